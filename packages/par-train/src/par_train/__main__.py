"""The process of the `par-train` command, and of `python -m par_train`, which torchrun and srun can start."""

import sys


def main() -> int:
    """Runs the command and returns its exit code, also where Ctrl-C comes while it is imported."""
    try:
        from .run.output import open_missing_streams  # noqa: PLC0415 - Ctrl-C may come meanwhile

        open_missing_streams()
        from .command.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        print("par-train: SIGINT: stopped before training began", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
