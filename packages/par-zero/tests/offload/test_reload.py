"""State that comes back from a disk between steps: nothing changes but where it lies."""

import copy

import pytest
import torch

from par_testing import for_each, storm
from par_zero import disk_usage as look
from par_zero import reload_state, residency

from ..helpers import assert_same, batch, loss_of, mlp, sharded, whole
from .cases import BF16, failing, moments, on_disk, small

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

STEPS = 4


def trained(stage, offload, sizes=(), **options):
    """Losses, parameters and state after steps; before each of the first ones some state comes back."""
    module, optimizer = sharded(mlp(), stage, small, offload=offload, **options)
    losses = []
    for step in range(STEPS):
        if step < len(sizes):
            there = look(module).pieces
            brought = reload_state(module, sizes[step])
            assert brought <= sizes[step]
            assert sum(there) - brought == sum(look(module).pieces)
        inputs = batch(step, width=8)
        loss = loss_of(module, inputs.bfloat16() if options else inputs)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": torch.stack(losses)} | whole(module) | moments(optimizer), module, optimizer


@for_each(case=((0, {}), storm((1, BF16)), storm((2, {})), (3, BF16)), late=(False, True))
@pytest.mark.ranks(2)
def test_reloaded_state_changes_no_number(case, late, tmp_path):
    stage, options = case
    if late and stage < 3:
        return
    offload = on_disk(tmp_path, {"disk": 0.8}, overlap=late)
    expected, *_ = trained(stage, None, **options)
    for sizes in ((0, 3 * 8192), (0, 20_000, 10**9), (10**9,)):
        found, module, optimizer = trained(stage, offload, sizes, **options)
        assert_same(found, expected)
        if sizes[-1] == 10**9:
            assert look(module).pieces == ()
            held = sum(each.nbytes for one in optimizer.state.values() for each in one.values() if each.dim())
            assert residency(module).now["device"]["optimizer"] >= held


@pytest.mark.ranks(1)
def test_reloaded_state_moves_no_bytes_and_loads_in_memory(tmp_path, monkeypatch):
    _, module, optimizer = trained(1, on_disk(tmp_path), (0, 10**9))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = {name: value.clone() for name, value in moments(optimizer).items()}
    loss_of(module, batch(9, width=8)).backward()
    failing(monkeypatch, "pwritev", 1)
    failing(monkeypatch, "preadv", 1)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert_same(moments(optimizer), expected)


@pytest.mark.ranks(1)
def test_disk_usage_and_reload_with_and_without_a_disk(tmp_path):
    module, _ = sharded(mlp(), 1, small, offload=on_disk(tmp_path))
    found = look(module)
    assert len(found.pieces) > 3
    assert found.read > 0
    assert found.write > 0
    with pytest.raises(ValueError, match=r"size=-1: .* pass 0 or more"):
        reload_state(module, -1)
    plain, _ = sharded(mlp(), 1, small)
    assert look(plain).pieces == ()
    assert reload_state(plain, 10**9) == 0
