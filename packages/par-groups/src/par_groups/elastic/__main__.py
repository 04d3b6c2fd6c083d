"""`python -m par_groups.elastic --ranks 4 -- python train.py`: start ranks and watch them."""

import argparse
import sys

from .keeper import keep


def main() -> int:
    """Read the command line and keep the ranks."""
    parser = argparse.ArgumentParser(prog="python -m par_groups.elastic", description="Start ranks and watch them.")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this host")
    parser.add_argument("--spares", type=int, default=0, help="ranks that wait until another one is lost")
    parser.add_argument("--restarts", type=int, default=0, help="starts of ranks that have died, as spares")
    parser.add_argument("--lease", type=float, default=20.0, help="seconds without a word after which a host is lost")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without progress before a rank is killed")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command of a rank, after --")
    given = vars(parser.parse_args())
    command = given.pop("command")
    return keep(command[1:] if command[:1] == ["--"] else command, **given)


if __name__ == "__main__":
    sys.exit(main())
