"""What all tests of the matrix have."""

import json
from pathlib import Path

import pytest

from ._training import EXTENTS


def pytest_collection_modifyitems(config, items):
    """Leaves out tests that are among the results: a run of the matrix that was interrupted continues."""
    path = config.getoption("--matrix-results")
    rows = Path(path).read_text().splitlines() if path and Path(path).exists() else []
    done = {row["test"] for row in map(json.loads, rows) if row["kind"] == "done"}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Notes in the process of pytest that a test has passed, or why it was skipped. One that fails is run again."""
    report = yield
    path = item.config.getoption("--matrix-results")
    if path and (report.skipped or (report.passed and call.when == "call")):
        why = report.longrepr[2] if report.skipped else None
        with Path(path).open("a") as file:
            file.write(json.dumps({"kind": "done", "test": item.nodeid, "skipped": why}) + "\n")
    return report


@pytest.fixture
def extent(request):
    """How much is computed."""
    return EXTENTS[request.config.getoption("--matrix")]


@pytest.fixture
def results(request):
    """The file that gets a line for each cell; None: there is none."""
    return request.config.getoption("--matrix-results")
