import torch
from torch import nn

from par_testing import saved_bytes


def test_each_storage_is_counted_once_and_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4, requires_grad=True)
    # The input, and the ReLU's output, which the ReLU and the second linear both save.
    assert saved_bytes(lambda: model(x), model.parameters()) == 4 * (16 * 4 + 16 * 8)


def test_what_is_not_saved_does_not_count():
    x = torch.randn(5, requires_grad=True)
    assert saved_bytes(lambda: x + 1) == 0
    with torch.no_grad():
        assert saved_bytes(lambda: x * x) == 0
    assert saved_bytes(lambda: x * x) == 20
