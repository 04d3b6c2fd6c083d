"""Tensors are small, so torch's threads would only wait for each other."""

import gc

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def quick_collector():
    """Leaves whatever was made before this test out of what Python's collector looks at, and lists."""
    gc.freeze()  # for good: to unfreeze would return all that the session has imported, which takes a second to search
