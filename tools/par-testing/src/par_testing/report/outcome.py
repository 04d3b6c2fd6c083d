"""How one rank ended, and who is to blame when several failed. Pure: no processes here."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto


class Ending(Enum):
    """The ways in which a rank can end."""

    PASSED = auto()
    SKIPPED = auto()
    XFAILED = auto()  # by calling pytest.xfail
    RAISED = auto()
    LOST_A_PEER = auto()  # raised too, but an error of communication that another rank's failure brings about
    DIED = auto()  # without a word: by a signal, or by os._exit
    RUNNING = auto()  # past the limit, and so it was killed by us
    WAITING = auto()  # the same, but inside a collective: for another rank


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one rank.

    Args:
        rank: Which rank.
        ending: In which way it ended.
        time: When, in seconds of the monotonic clock, which all processes of a machine share.
        headline: What happened, in one line that goes on after "rank 3 ".
        details: The traceback or the stack, if there is one.
        exit_code: For DIED: as subprocess has it, negative for a signal.
    """

    rank: int
    ending: Ending
    time: float
    headline: str
    details: str = ""
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether this end makes the test fail."""
        return self.ending not in (Ending.PASSED, Ending.SKIPPED, Ending.XFAILED)


def died(rank: int, time: float, exit_code: int) -> Outcome:
    """The end of a rank whose process is gone before the test returned on it."""
    if exit_code < 0:
        headline = f"was killed by {_signal_name(-exit_code)}"
    else:
        headline = f"exited with code {exit_code} before the test returned"
    return Outcome(rank=rank, ending=Ending.DIED, time=time, headline=headline, exit_code=exit_code)


def as_declared_to_die(outcome: Outcome) -> Outcome:
    """Turns the end of a rank of `dies=` around: to be killed is right, to return is wrong."""
    if outcome.exit_code is not None and outcome.exit_code < 0:
        return replace(outcome, ending=Ending.PASSED, headline=f"{outcome.headline}, as it should")
    if outcome.ending is Ending.PASSED:
        return replace(outcome, ending=Ending.RAISED, headline="returned, though it was expected to be killed (dies=)")
    return outcome


def by_blame(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The failed ranks, the culprit first.

    First come those that failed by themselves, in the order of time. If there is none, a rank that never came to the
    collective in which the others wait is the culprit. Consequences come last.
    """
    failures = [outcome for outcome in outcomes if outcome.failed]
    return sorted(failures, key=lambda outcome: (_BLAME[outcome.ending], outcome.time, outcome.rank))


_BLAME = {
    Ending.RAISED: 0,
    Ending.DIED: 0,
    Ending.RUNNING: 1,
    Ending.LOST_A_PEER: 2,
    Ending.WAITING: 3,
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        return f"signal {number}"
