"""What the plugin does besides running worlds."""

import subprocess

import pytest
from hypothesis import HealthCheck, settings

from .conftest import command


@pytest.fixture(scope="module")
def cases(run_inner):
    """Of a run that has no world to start: one module cannot be collected, the other has no rank test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        return run_inner("wrong.py plain.py", "--continue-on-collection-errors")


def test_run_without_worlds_imports_no_torch_and_computes_in_one_thread(cases):
    assert cases["test_torch_is_not_imported"].kind == "passed"
    assert cases["test_libraries_compute_in_one_thread"].kind == "passed"


def test_wrong_marker_is_an_error_of_collection(cases):
    (error,) = [case for case in cases.values() if case.kind == "error"]
    assert "ranks(0): a world has at least 1 rank" in error.report


def test_unittest_is_refused():
    done = subprocess.run(command("unittest_case.py"), capture_output=True, text=True, timeout=240, check=False)
    assert "unittest runs its methods itself; write a rank test as a function" in done.stdout + done.stderr


def test_marker_is_documented(request):
    assert any(line.startswith("ranks(n, timeout=300") for line in request.config.getini("markers"))


def test_property_tests_take_their_time_and_have_the_same_examples_every_time():
    assert (settings.default.deadline, settings.default.derandomize) == (None, True)
    assert HealthCheck.too_slow in settings.default.suppress_health_check
