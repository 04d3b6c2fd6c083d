import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIMIT = 280  # seconds of an inner run, fewer than the default of a world: one that waits for that is found
INNER = Path(__file__).parent / "inner"
OPTIONS = ("--import-mode=importlib", "--strict-markers", "-W", "error", "-p", "no:cacheprovider", "-ra")


@dataclass(frozen=True)
class Case:
    """One test of an inner run: how it ended, what was reported, and the seconds it took."""

    kind: str
    report: str
    seconds: float

    @property
    def headline(self):
        return self.report.partition("\n")[0]


def command(files, *arguments):
    """The command line of an inner run: a pytest session of its own on files that the outer one does not collect."""
    paths = [str(INNER / file) for file in files.split()]
    return [sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={INNER}", *paths, *arguments]


@pytest.fixture(scope="session")
def run_inner(tmp_path_factory):
    """Runs pytest on files of inner/, some of whose tests fail; returns its cases by name."""

    def run(files, *arguments):
        xml = tmp_path_factory.mktemp("inner") / "report.xml"
        done = subprocess.run(
            command(files, f"--junitxml={xml}", *arguments), capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
        return {case.get("name"): _case(case) for case in ElementTree.parse(xml).iter("testcase")}

    return run


@pytest.fixture(scope="session")
def start_inner():
    """Starts pytest on inner/<file> and lets the test go on."""
    started = []
    # A shell that runs its tests in the background ignores Ctrl-C, and what it starts would too.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(file, *arguments):
        process = subprocess.Popen(command(file, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield start
    signal.signal(signal.SIGINT, usual)
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def eventually():
    """Waits for a condition, which must come true within minutes: a busy machine takes two to start an inner run."""

    def wait(condition, seconds=LIMIT):
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "it did not come true in time"
            time.sleep(0.02)

    return wait


def _case(element):
    for child in element:
        if child.tag in ("failure", "error", "skipped"):
            text = child.get("message", "") if child.tag == "skipped" else (child.text or "")
            return Case(child.tag, text, float(element.get("time")))
    return Case("passed", "", float(element.get("time")))
