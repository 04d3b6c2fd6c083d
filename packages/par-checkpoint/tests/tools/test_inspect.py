"""Looking at what a checkpoint holds."""

import pytest
import torch
from torch import nn

from par_checkpoint import CheckpointError, Format, inspect, save


def test_inspect_tells_what_is_there(tmp_path):
    path, model = tmp_path / "c", nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    save(path, model=model, optimizer=optimizer, extra={"epoch": 3}, step=9, format=Format(max_shard_size=100))
    contents = inspect(path)
    assert contents.style == "huggingface"
    assert contents.step == 9
    assert contents.extra == {"epoch": 3}
    assert contents.parameters == sum(each.numel() for each in model.parameters())
    assert {name: place.shape for name, place in contents.tensors.items()} == {
        name: tuple(each.shape) for name, each in model.state_dict().items()
    }
    assert contents.optimizer["0.weight.exp_avg"].shape == (7, 5)
    assert contents.groups[0][1]["lr"] == 0.1
    assert contents.bytes == sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    with pytest.raises(CheckpointError, match="there is no folder"):
        inspect(path / "nothing")
