"""The session for a GPU that is available for some minutes: limits, order, and what another call continues with."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from gpu_session import PARTS, Part, run  # noqa: E402 - a script of tools


def test_parts_fit_in_twelve_minutes_and_name_files_that_exist():
    assert sum(part.seconds for part in PARTS) <= 720
    for part in PARTS:
        assert all((ROOT / name).exists() for name in part.command if name.endswith(".py"))
    tests = {name for part in PARTS for name in part.command if "test_" in name}
    assert tests == {str(path.relative_to(ROOT)) for path in (ROOT / "tests-integration/gpu").glob("test_*.py")}


def test_session_continues_with_the_parts_that_have_not_succeeded(tmp_path):
    says, fails = Part("says", ["-c", "print('figures')"], 20), Part("fails", ["-c", "raise SystemExit(3)"], 20)
    hangs, long = Part("hangs", ["-c", "import time; time.sleep(60)"], 0.5), Part("long", ["-c", ""], 600)
    found = run([says, fails, hangs, long], tmp_path, minutes=1)
    assert found["says"].startswith("done after")
    assert found["fails"].startswith("failed with exit code 3")
    assert found["hangs"].startswith("stopped at its time limit")
    assert found["long"].startswith("skipped")
    assert (tmp_path / "says.log").read_text() == "figures\n"
    again = run([says, Part("fails", ["-c", ""], 20)], tmp_path, minutes=1)
    assert again["says"] == "done before"
    assert again["fails"].startswith("done after")
