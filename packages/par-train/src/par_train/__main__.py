"""The process of the `par-train` command, and of `python -m par_train`, which torchrun and srun can start."""

import sys


def main() -> int:
    """Run the command, and return its exit code, also if Ctrl-C interrupts the imports."""
    try:
        from .run.output import open_missing_streams  # noqa: PLC0415 - so that Ctrl-C is caught

        # Before anything else is opened: the next file would get the number of a missing stream.
        open_missing_streams()
        from .command.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        print("par-train: SIGINT: stopped before training began", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
