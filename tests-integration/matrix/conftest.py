"""What all tests of the matrix have."""

import pytest

from ._training import EXTENTS


@pytest.fixture
def extent(request):
    """How much is computed."""
    return EXTENTS[request.config.getoption("--matrix")]


@pytest.fixture
def results(request):
    """The file that gets a line for each cell; None: there is none."""
    return request.config.getoption("--matrix-results")
