"""Reading one tensor of a checkpoint, or a rectangle of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from par_checkpoint import Format, read_tensor, save
from par_checkpoint.tools.read import runs
from par_groups import Box


@pytest.fixture
def checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    save(
        tmp_path / "c", model=model, optimizer=optimizer, extra={"epoch": 3}, step=9, format=Format(max_shard_size=100)
    )
    return tmp_path / "c", model, optimizer


def box(start, size):
    return Box(tuple(start), tuple(size), 0, (1,) * len(size), ())


def test_a_rectangle_is_read(checkpoint):
    path, model, optimizer = checkpoint
    assert torch.equal(read_tensor(path, "0.weight"), model[0].weight)
    assert torch.equal(read_tensor(path, "0.weight", box((2, 1), (3, 2))), model[0].weight[2:5, 1:3])
    assert torch.equal(read_tensor(path, "0.weight.exp_avg"), optimizer.state[model[0].weight]["exp_avg"])


def test_what_is_not_there_is_an_error(checkpoint):
    path, _, _ = checkpoint
    with pytest.raises(KeyError, match="no tensor 'weight'"):
        read_tensor(path, "weight")
    with pytest.raises(ValueError, match=r"leaves '0\.weight', which has shape \(7, 5\)"):
        read_tensor(path, "0.weight", box((6, 0), (2, 5)))


def test_tied_and_torch_style_are_read_by_name(tmp_path):
    table = nn.Embedding(4, 3)
    model = nn.ModuleDict({"table": table, "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = table.weight
    for style in ("huggingface", "torch"):
        save(tmp_path / style, model=model, format=Format(style=style))
        assert torch.equal(read_tensor(tmp_path / style, "head.weight", box((1, 0), (2, 3))), table.weight[1:3])


@given(st.data())
def test_runs_are_the_rectangle_in_order(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    found = [i for first, count in runs(shape, start, size) for i in range(first, first + count)]
    assert found == whole[index].reshape(-1).tolist()
