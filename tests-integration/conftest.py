"""`--device` chooses what the suites run on, `--matrix` how much of the matrix."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="what the suites run on (default: cpu)")
    parser.addoption(
        "--matrix", default="cover", choices=["cover", "full"], help="which cells of the matrix run (default: cover)"
    )
    parser.addoption("--matrix-results", metavar="FILE", help="add a JSON line for each cell of the matrix to FILE")


def pytest_configure(config):
    """Has what the first model of transformers in a process makes there where ranks are forked."""
    config.addinivalue_line("ranks_preload", "par_testing.ranks.transformers_once")


@pytest.fixture
def device(request):
    """The device type as a string, which goes to ranks as it is."""
    import torch

    device = request.config.getoption("--device")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return device
