"""What all tests of the matrix have."""

import pytest
import torch


@pytest.fixture
def results(request):
    """The file that gets a line for each cell; None: there is none."""
    return request.config.getoption("--matrix-results")


@pytest.fixture(autouse=True)
def one_thread():
    """The one process has one thread, as ranks have: it is several times as fast with models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
