"""What all tests of the matrix have."""

import pytest


@pytest.fixture
def extent(request):
    """How much of the matrix runs: "cover" or "full"."""
    return request.config.getoption("--matrix")


@pytest.fixture
def results(request):
    """The file that gets a line for each cell; None: there is none."""
    return request.config.getoption("--matrix-results")
