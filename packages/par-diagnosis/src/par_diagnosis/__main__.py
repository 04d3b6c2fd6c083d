"""`python -m par_diagnosis FOLDER`: report which rank hung, from the dumps of a job. It needs no torch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ._dump import read_folder
from ._explain import explain


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line that names the rank that blocks the other ranks, then one line per rank.

    Args:
        arguments: Command-line arguments. Default: `sys.argv[1:]`.

    Returns:
        Exit code: 0, or 2 if the folder has no dumps.
    """
    parser = argparse.ArgumentParser(
        prog="python -m par_diagnosis",
        description="Reports which rank of a job hung, where and why, and what every other rank was doing. Reads the "
        "dumps of par-diagnosis. For a rank without such a dump, reads the dump of torch's flight recorder.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder of the dumps, or of the run that has them")
    try:
        found = read_folder(Path(parser.parse_args(arguments).folder).expanduser())
    except ValueError as mistake:
        print(f"par-diagnosis: {mistake}", file=sys.stderr)
        return 2
    world = max([dump.world for dump in found.dumps.values()] + [rank + 1 for rank in (*found.dumps, *found.deaths)])
    absent = {rank: words for rank, words in found.deaths.items() if rank not in found.dumps}
    explanation = explain(found.dumps, world, absent)
    print(explanation.line)
    for line in (*explanation.details, *(f"not read: {problem}" for problem in found.unreadable)):
        print(f"    {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
