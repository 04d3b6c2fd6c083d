"""The text of a failed rank test: the culprit first, then the others."""

from collections.abc import Sequence

from .outcome import Ending, Outcome, by_blame

_WIDTH = 100


def describe_failure(outcomes: Sequence[Outcome], output: Sequence[str], started: float) -> str:
    """One headline that names the culprit, then a section for each rank in the order of blame.

    Args:
        outcomes: How every rank of the world ended.
        output: What each rank wrote to stdout and stderr.
        started: When the test began, in seconds of the monotonic clock.
    """
    failures = by_blame(outcomes)
    culprit = failures[0]
    sections = [f"rank {culprit.rank} of {len(outcomes)} {culprit.headline}"]
    for outcome in failures:
        sections.append(_section(outcome, output[outcome.rank], outcome.time - started))
    for outcome in outcomes:
        if not outcome.failed:
            sections.append(_section(outcome, output[outcome.rank], outcome.time - started))
    return "\n\n".join(sections)


_REMARKS = {
    Ending.LOST_A_PEER: " (likely because of another rank)",
    Ending.WAITING: " (for another rank)",
}


def _section(outcome: Outcome, output: str, seconds: float) -> str:
    remark = _REMARKS.get(outcome.ending, "")
    title = f" rank {outcome.rank}, after {seconds:.2f} s{remark} "
    lines = [title.center(_WIDTH, "="), outcome.details.rstrip() or outcome.headline]
    if output.strip():
        lines += [f" output of rank {outcome.rank} ".center(_WIDTH, "-"), output.rstrip()]
    return "\n".join(lines)
