"""The process of the `par-train` command, and of `python -m par_train`, which torchrun and srun can start."""

import sys


def main() -> int:
    """Runs the command and returns its exit code, also where Ctrl-C comes while it is imported."""
    try:
        from ._cli import main as command  # noqa: PLC0415 - Ctrl-C may come meanwhile
        from ._output import open_missing_streams  # noqa: PLC0415

        open_missing_streams()
        return command()
    except KeyboardInterrupt:
        print("par-train: SIGINT: stopped before training began", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
