"""One tensor under two names."""

import json

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from par_checkpoint import CheckpointError, Format, inspect, load, save, verify
from par_testing import default_device_type

from .helpers import rectangle


class Tied(nn.Module):
    """An embedding whose table is also the head's weight."""

    def __init__(self, seed=0, tied=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight

    def step(self, optimizer):
        self.head(self.embed(torch.arange(3))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_one_is_stored_and_both_are_loaded(style, tmp_path):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.step(optimizer)
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style=style))
    if style == "huggingface":
        assert list(safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")) == ["embed.weight"]
        assert json.loads((tmp_path / "c" / "par_checkpoint.json").read_text())["tied"] == {
            "head.weight": "embed.weight"
        }
    assert verify(tmp_path / "c") == []
    other = Tied(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    report = load(tmp_path / "c", model=other, optimizer=again)
    assert report.missing == report.unexpected == ()
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)
    model.step(optimizer)
    other.step(again)
    assert torch.equal(other.head.weight, model.head.weight)


class Wide(nn.Module):
    """The two weights alone, of more than a block, each cut into rows over the ranks."""

    def __init__(self, value, mesh, tied):
        super().__init__()
        self.embed = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
        self.head = self.embed if tied else nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))


@pytest.mark.ranks(2)
def test_an_untied_model_in_rows_gets_the_values_twice(tmp_path):
    mesh, value = (
        init_device_mesh(default_device_type(), (2,)),
        torch.randn(3001, 500, generator=torch.Generator().manual_seed(0)),
    )
    save(tmp_path / "c", model=Wide(value, mesh, tied=True))
    other = Wide(torch.zeros_like(value), mesh, tied=False)
    load(tmp_path / "c", model=other)
    assert torch.equal(other.embed.full_tensor(), value)
    assert torch.equal(other.head.full_tensor(), value)


@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_an_untied_model_gets_the_values_twice(style, tmp_path):
    model, other = Tied(), Tied(1, tied=False)
    save(tmp_path / "c", model=model, format=Format(style=style))
    load(tmp_path / "c", model=other)
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert torch.equal(other.head.weight, model.embed.weight)


@pytest.mark.ranks(2)
def test_an_untied_model_may_cut_the_two_differently(tmp_path):
    model, rank = Tied(), dist.get_rank()
    save(tmp_path / "c", model=model)
    layout = {
        "embed.weight": rectangle((6, 4), 0, 3 * rank, 3 * rank + 3, rank),
        "head.weight": rectangle((6, 4), 1, 2 * rank, 2 * rank + 2, rank),
    }
    parts = {"embed.weight": torch.zeros(3, 4), "head.weight": torch.zeros(6, 2)}
    load(tmp_path / "c", model=parts, format=Format(layout=layout))
    for name, part in parts.items():
        assert torch.equal(part, model.embed.weight[layout[name].boxes[0].slices]), name


def test_a_model_with_only_the_other_name_finds_it(tmp_path):
    model = Tied()
    save(tmp_path / "c", model=model)
    other = nn.ParameterDict({"head": torch.zeros(6, 4)})
    load(tmp_path / "c", model=other, format=Format(names={"head": "head.weight"}))
    assert torch.equal(other["head"], model.embed.weight)


def test_renamed_tied_names(tmp_path):
    model, other = Tied(), Tied(1)
    names = {"embed.weight": "wte", "head.weight": "lm_head"}
    save(tmp_path / "c", model=model, format=Format(names=names))
    assert list(safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")) == ["wte"]
    load(tmp_path / "c", model=other, format=Format(names=names))
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("pickled", [False, True])
def test_both_stored_must_be_equal(pickled, tmp_path):
    value = torch.randn(6, 4)

    def write(state):
        if pickled:
            torch.save(state, tmp_path / "pytorch_model.bin")
        else:
            safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})

    write({"embed.weight": value, "head.weight": value.clone()})
    model = Tied(1)
    load(tmp_path, model=model)
    assert torch.equal(model.embed.weight, value)
    write({"embed.weight": value, "head.weight": value + 1})
    model = Tied(1)
    before = model.embed.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'embed.weight' and 'head.weight' are one tensor .* but differ"):
        load(tmp_path, model=model)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_foreign_file_may_store_either(name, tmp_path):
    value = torch.randn(6, 4)
    safetensors.torch.save_file({name: value}, tmp_path / "model.safetensors", {"format": "pt"})
    model = Tied(1)
    load(tmp_path, model=model)
    assert torch.equal(model.head.weight, value)
    assert model.head.weight is model.embed.weight


def test_ties_on_the_meta_device_stay(tmp_path):
    model = Tied()
    save(tmp_path / "c", model=model)
    with torch.device("meta"):
        other = Tied(1)
    load(tmp_path / "c", model=other)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_empty_tensors_and_parts_of_a_storage_are_not_tied(tmp_path):
    base = torch.arange(4.0)
    model = {"a": torch.zeros(0), "b": torch.zeros(0), "low": base[:2], "high": base[2:], "all": base}
    save(tmp_path / "c", model=model)
    assert sorted(safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")) == sorted(model)


class Ends(nn.Module):
    """An embedding and a head, one tensor under two names, or one each with the same values."""

    def __init__(self, names=("embed", "head"), *, tied=True):
        super().__init__()
        weight = torch.arange(6.0).view(2, 3)
        shared = nn.Parameter(weight.clone())
        for name in names:
            self.register_parameter(name, shared if tied else nn.Parameter(weight.clone()))


@pytest.mark.parametrize("kind", ["tied", "the other first", "untied"])
def test_slots_of_a_tied_parameter_are_found_under_any_of_its_names(kind, tmp_path):
    def made(kind):
        model = Ends(("head", "embed") if kind == "the other first" else ("embed", "head"), tied=kind != "untied")
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = made(kind)
    for parameter in model.parameters():
        parameter.grad = torch.ones(2, 3)
    optimizer.step()
    save(tmp_path / "c", model=model, optimizer=optimizer)
    for other, into in map(made, ("tied", "the other first", "untied")):
        load(tmp_path / "c", model=other, optimizer=into)
        assert len(into.state) == len(list(other.parameters()))
        for state in into.state.values():
            assert all(torch.equal(value, optimizer.state[model.head][slot]) for slot, value in state.items())


@pytest.mark.ranks(2)
def test_ties_that_one_rank_knows_alone_are_kept_and_two_for_one_name_are_refused(tmp_path):
    """Two stages of a pipeline, of which the second one ties two of its tensors."""
    rank, value = dist.get_rank(), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    stages = [{"first": torch.ones(3)}, {"x": value, "y": value}]
    save(tmp_path / "c", model=stages[rank])
    assert inspect(tmp_path / "c").tied == {"y": "x"}
    untied = {"first": torch.zeros(3), "x": torch.zeros(6, 4), "y": torch.zeros(6, 4)}
    load(tmp_path / "c", model=untied)
    assert torch.equal(untied["x"], value)
    assert torch.equal(untied["y"], value)
    apart = [{"x": value, "y": value}, {"x": value, "y": value.clone()}]  # which the second one stores
    save(tmp_path / "d", model=apart[rank])
    assert inspect(tmp_path / "d").tied == {}
    other = [{"x": value, "z": value, "y": torch.ones(2)}, {"y": torch.ones(2), "z": torch.ones(2)}]
    other[1]["z"] = other[1]["y"]
    with pytest.raises(ValueError, match="'z' shares the memory of 'x' on rank 0, and of 'y' on rank 1"):
        save(tmp_path / "e", model=other[rank])
