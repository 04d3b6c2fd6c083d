"""`par-train diagnose`: which rank keeps the others, from the dumps that a job has left. No torch, no ranks."""

from pathlib import Path

from ..diagnosis.dump import read_folder
from ..diagnosis.explain import explain


def diagnose(folder: str) -> int:
    """Prints one line that says who keeps whom, and one for each rank.

    Args:
        folder: The folder of a run, or of the dumps: par-train's, or those of torch's flight recorder.

    Returns:
        The exit code of the process.

    Raises:
        UserError: There is no dump.
    """
    found = read_folder(Path(folder).expanduser())
    ranks = [*found.dumps, *found.deaths]
    world = max([dump.world for dump in found.dumps.values()] + [max(ranks) + 1])
    absent = {rank: words for rank, words in found.deaths.items() if rank not in found.dumps}
    explanation = explain(found.dumps, world, absent)
    print(explanation.line)
    for line in (*explanation.details, *(f"not read: {problem}" for problem in found.unreadable)):
        print(f"    {line}")
    return 0
