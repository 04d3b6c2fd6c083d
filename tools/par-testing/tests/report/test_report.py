from par_testing.report.outcome import Ending, Outcome
from par_testing.report.report import describe_failure


def test_culprit_first_then_the_others():
    outcomes = [
        Outcome(rank=0, ending=Ending.PASSED, time=10.5, headline="returned"),
        Outcome(rank=1, ending=Ending.LOST_A_PEER, time=10.2, headline="raised RuntimeError: gone", details="trace 1"),
        Outcome(rank=2, ending=Ending.RAISED, time=10.1, headline="raised ValueError: bad", details="trace 2"),
    ]
    lines = describe_failure(outcomes, ["", "", "said\n"], started=10.0).splitlines()
    assert [line.strip("=- ") for line in lines if line] == [
        "rank 2 of 3 raised ValueError: bad",
        "rank 2, after 0.10 s",
        "trace 2",
        "output of rank 2",
        "said",
        "rank 1, after 0.20 s (likely because of another rank)",
        "trace 1",
        "rank 0, after 0.50 s",
        "returned",
    ]
