"""Buffers that no file holds, in modules on the meta device: computed anew by their modules, or an error."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, load, save
from par_checkpoint.state.model import device_for


class Rotary(nn.Module):
    """Frequencies that no state dict has; computed when made, and again when asked."""

    def __init__(self, base=100.0):
        super().__init__()
        self.base = base
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("ids", torch.empty(1, dtype=torch.int64).expand(5), persistent=False)
        self.register_buffer("none", None, persistent=False)
        self.register_buffer("steps", torch.zeros(2))
        self.reset_buffers()

    def reset_buffers(self):
        self.frequencies.copy_(self.base ** -torch.arange(4.0))
        self.ids = torch.arange(5)


class Forgets(Rotary):
    """Computes one of two, or none."""

    def reset_buffers(self):
        self.frequencies.copy_(torch.ones(4))


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3), persistent=False)


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_module_computes_its_own(default, tmp_path):
    def make():
        shared = Rotary(10.0)
        return nn.ModuleDict({"a": Rotary(), "b": shared, "c": shared, "d": nn.Linear(2, 2)})

    model = make()
    save(tmp_path / "c", model=model)
    other = on_meta(make)
    frequencies = other["b"].frequencies
    with torch.device(default):
        report = load(tmp_path / "c", model=other)
    assert report.recomputed == ("a.frequencies", "a.ids", "b.frequencies", "b.ids")
    assert report.missing == ()
    assert other["c"].frequencies is frequencies, "whoever holds a buffer holds it still"
    mine, others = dict(model.named_buffers()), dict(other.named_buffers())
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert load(tmp_path / "c", model=other).recomputed == (), "there is nothing more to make"


@pytest.mark.ranks(2)
def test_stages_compute_their_own(tmp_path):
    rank = dist.get_rank()
    model = nn.ModuleDict({str(rank): Rotary()} if rank else {"0": nn.Linear(2, 2)})
    save(tmp_path / "c", model=model)
    other = on_meta(lambda: nn.ModuleDict({str(rank): Rotary()} if rank else {"0": nn.Linear(2, 2)}))
    assert load(tmp_path / "c", model=other).recomputed == ("1.frequencies", "1.ids")
    assert not any(buffer.is_meta for buffer in other.buffers())


@pytest.mark.ranks(2)
def test_what_nobody_computes_is_an_error_before_anything_changes(tmp_path):
    save(tmp_path / "c", model=Silent())
    other = on_meta(Silent) if dist.get_rank() else Silent()
    before = other.inner.weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"nothing was changed(?s:.*)'mask' is a buffer on the meta device that no file holds: give its Silent a "
        r"method reset_buffers\(\) that computes it",
    ):
        load(tmp_path / "c", model=other)
    assert other.inner.weight.is_meta if dist.get_rank() else torch.equal(other.inner.weight, before)
    report = load(tmp_path / "c", model=other, strict=False)
    assert report.missing == ("mask",)
    assert report.recomputed == ()
    assert other.mask.is_meta == bool(dist.get_rank())
    assert not other.inner.weight.is_meta


@pytest.mark.ranks(2)
def test_a_module_that_forgets_one_is_named(tmp_path):
    save(tmp_path / "c", model=Rotary())
    other = on_meta(Forgets) if dist.get_rank() else Rotary()
    with pytest.raises(CheckpointError, match=r"rank 1: 'ids' got no values from Forgets\.reset_buffers\(\)"):
        load(tmp_path / "c", model=other)


def test_buffers_that_have_memory_are_left_alone(tmp_path):
    model = Rotary()
    save(tmp_path / "c", model=model)
    model.frequencies.zero_()
    assert load(tmp_path / "c", model=model).recomputed == ()
    assert not model.frequencies.any()
    assert load(tmp_path / "c", model=dict(on_meta(Rotary).state_dict()), strict=False).recomputed == ()


@pytest.mark.parametrize(
    ("device", "mesh", "expected"), [(None, "cuda", "cuda:3"), (None, "cpu", "cpu"), ("cpu", "cuda", "cpu")]
)
def test_what_is_made_lies_on_the_device_of_the_models_mesh_unless_told_otherwise(monkeypatch, device, mesh, expected):
    """Without a GPU here the mesh is a stand-in."""
    cut = torch.empty(3, device="meta")
    cut.device_mesh = SimpleNamespace(device_type=mesh)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 3))
    model = {"plain": torch.empty(2, device="meta"), "cut": cut}
    assert device_for(device, model) == torch.device(expected)
    assert device_for(None, {"plain": torch.empty(2, device="meta")}) == torch.device("cpu")
    assert device_for(None, None) == torch.device("cpu")
