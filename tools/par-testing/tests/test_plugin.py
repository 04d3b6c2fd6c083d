"""What the plugin does besides running worlds."""

import subprocess

import pytest

from .conftest import command


def test_run_without_rank_tests_imports_no_torch_and_computes_in_one_thread(run_inner, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cases = run_inner("plain.py", expect=0)
    assert cases["test_torch_is_not_imported"].kind == "passed"
    assert cases["test_libraries_compute_in_one_thread"].kind == "passed"


def test_wrong_marker_is_an_error_of_collection(run_inner):
    (case,) = run_inner("wrong.py", expect=2).values()
    assert "ranks(0): a world has at least 1 rank" in case.report


def test_a_module_that_ranks_cannot_import_fails_its_tests(run_inner):
    case = run_inner("elsewhere.py")["test_is_found_out"]
    assert case.headline == "rank 0 of 1 raised RuntimeError: not in this process"


def test_run_with_xdist():
    pytest.importorskip("xdist")
    arguments = command("spread.py", "-n", "2", "--dist", "load")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_unittest_is_refused():
    done = subprocess.run(command("unittest_case.py"), capture_output=True, text=True, timeout=60, check=False)
    assert "unittest runs its methods itself; write a rank test as a function" in done.stdout + done.stderr


def test_marker_is_documented(request):
    assert any(line.startswith("ranks(n, timeout=60") for line in request.config.getini("markers"))
