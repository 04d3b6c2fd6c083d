"""Every way in which a world can fail is reported with the culprit first, and in time.

Worlds that do not hang have the usual limit, which is longer than all of them may take together.
"""

import importlib.util
import re

import pytest

WITH_XDIST = importlib.util.find_spec("xdist") is not None


@pytest.fixture(scope="module")
def cases(run_inner):
    """In workers of pytest-xdist, where there is it: reports are then sent from there, too, and hangs pass together."""
    return run_inner("failing.py elsewhere.py spread.py", *(("-n", "2") if WITH_XDIST else ()))


def test_exception_shows_traceback_values_and_output(cases):
    case = cases["test_raise"]
    assert case.headline == "rank 1 of 2 raised AssertionError: assert (3 + 1) == 2"
    assert "+  where 2 = <function get_world_size" in case.report
    assert "value + 1 == dist.get_world_size()" in case.report
    assert "a word on stdout\na word on file descriptor 2" in case.report


def test_exception_ends_the_others_at_once(cases):
    case = cases["test_raise"]
    assert case.report.index("= rank 1, after") < case.report.index("= rank 0, after")
    assert re.search(r"s \((likely because of|for) another rank\) =", case.report)  # if it had time to notice, or not


def test_hanging_rank_is_named_before_those_that_gave_up_on_it(cases):
    case = cases["test_hang"]
    assert case.headline == "rank 1 of 3 was still running, outside of any collective"
    assert re.search(r'_faults.py", line \d+ in check\n  File ".*failing.py", line \d+ in test_hang', case.report)
    assert "Timed out waiting" in case.report  # of one of the others, or of both


@pytest.mark.parametrize("name", ["test_hang_before_the_others_give_up", "test_hang_below_backward"])
def test_hanging_rank_is_told_from_waiting_ones_by_the_stacks(cases, name):
    case = cases[name]
    assert case.headline == "rank 1 of 2 was still running, outside of any collective"
    assert "s (for another rank) =" in case.report
    assert case.report.count(f"in {name}") == 2  # the stack of both


def test_killed_rank_is_named_before_those_that_lost_it(cases):
    case = cases["test_kill"]
    assert case.headline == "rank 2 of 3 was killed by SIGKILL"


def test_crash_shows_the_stack(cases):
    case = cases["test_crash"]
    assert case.headline == "rank 1 of 2 was killed by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in case.report
    assert "in test_crash" in case.report


def test_exit_is_no_success(cases):
    assert cases["test_exit"].headline == "rank 1 of 2 exited with code 0 before the test returned"


def test_first_failure_is_named_first(cases):
    report = cases["test_two_fail_by_themselves"].report
    assert report.startswith("rank 1 of 3 raised ValueError: from rank 1")
    assert report.index("= rank 1, after") < report.index("= rank 0, after") < report.index("= rank 2, after")


def test_stopped_rank_is_ended_too(cases):
    case = cases["test_stopped"]
    assert case.headline == "rank 1 of 2 was still running, outside of any collective"


def test_thread_left_behind(cases):
    case = cases["test_thread_left_behind"]
    assert case.headline.startswith("rank 1 of 2 was still running")
    assert "in _shutdown" in case.report


def test_skip_of_one_rank_skips_the_test(cases):
    case = cases["test_skip"]
    assert (case.kind, case.report) == ("skipped", "not today")


def test_skip_hides_no_failure(cases):
    assert cases["test_skip_hides_no_failure"].headline == "rank 0 of 2 raised ValueError: a failure of its own"


def test_xfail(cases):
    assert cases["test_xfail"].kind == "skipped"  # JUnit's word for it


def test_unpicklable_argument_is_named(cases):
    report = cases["test_unpicklable[lambda]"].report
    assert "the argument 'function' of a rank test cannot be pickled" in report


def test_a_module_that_ranks_cannot_import_fails_its_tests(cases):
    case = cases["test_is_found_out"]
    assert case.headline == "rank 0 of 1 raised RuntimeError: not in this process"


def test_rank_declared_to_die_must(cases):
    assert cases["test_survives"].headline.startswith("rank 1 of 2 returned, though it was expected to be killed")
    assert cases["test_raises_instead_of_dying"].headline == "rank 1 of 2 raised ValueError: I only raise"


def test_warning_filters_hold_in_ranks(cases):
    assert cases["test_warning_is_an_error"].headline == "rank 0 of 1 raised UserWarning: a leak"


@pytest.mark.skipif(not WITH_XDIST, reason="pytest-xdist is not installed")
def test_worlds_run_in_a_worker_of_xdist(cases):
    assert [cases[name].kind for name in ("test_world_in_a_worker", "test_of_a_worker_itself")] == ["passed"] * 2


def test_async_test_is_refused(cases):
    assert "a test returns None, not coroutine" in cases["test_async"].headline
