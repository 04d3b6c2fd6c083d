from par_testing.report.outcome import Ending, Outcome, as_declared_to_die, by_blame, died


def outcome(rank, ending, time):
    return Outcome(rank=rank, ending=ending, time=time, headline="")


def order(*outcomes):
    return [each.rank for each in by_blame(outcomes)]


def test_earliest_failure_first():
    assert order(outcome(0, Ending.RAISED, 2.0), outcome(1, Ending.DIED, 1.0), outcome(2, Ending.RAISED, 3.0)) == [
        1,
        0,
        2,
    ]


def test_consequences_last_even_if_noticed_earlier():
    assert order(outcome(0, Ending.LOST_A_PEER, 1.0), outcome(1, Ending.DIED, 1.1)) == [1, 0]


def test_rank_outside_of_the_collective_before_those_that_wait_for_it():
    assert order(
        outcome(0, Ending.WAITING, 5.0), outcome(1, Ending.LOST_A_PEER, 4.0), outcome(2, Ending.RUNNING, 5.1)
    ) == [2, 1, 0]


def test_only_failures_are_blamed():
    assert order(outcome(0, Ending.PASSED, 1.0), outcome(1, Ending.SKIPPED, 1.0), outcome(2, Ending.XFAILED, 1.0)) == []


def test_words_for_a_death():
    assert died(0, 1.0, -9).headline == "was killed by SIGKILL"
    assert died(0, 1.0, -40).headline == "was killed by signal 40"
    assert died(0, 1.0, 3).headline == "exited with code 3 before the test returned"


def test_declared_death():
    assert not as_declared_to_die(died(0, 1.0, -9)).failed
    assert as_declared_to_die(died(0, 1.0, 1)).failed
    assert as_declared_to_die(outcome(0, Ending.PASSED, 1.0)).failed
    assert as_declared_to_die(outcome(0, Ending.RAISED, 1.0)).failed
