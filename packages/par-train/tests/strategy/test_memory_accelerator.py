"""`Strategy(memory=...)` on an accelerator: the same bits, and no tier above its budget, by the allocator's count."""

import gc
import time

import pytest
import torch
from torch import nn

from par_testing import Accelerator, for_each, storm
from par_train import Strategy
from par_zero import residency

from .test_memory import Block as Narrow

ROWS, WIDTH = 64, 64


class Block(Narrow):
    def __init__(self):
        nn.Module.__init__(self)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.act, self.down = nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)


def trained(memory, zero, precision="fp32", steps=4, other=0):
    """Losses, what was spent, and the device's peaks and the host's bytes in each step."""
    time.sleep(0.2)  # the thread of the last step holds the model for a moment after its step
    gc.collect()
    base = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with Strategy(memory=memory, zero={"stage": zero, "overlap": {"bucket": 1}}, precision=precision) as strategy:
        model, optimizer = strategy.initialize(model, optimizer)
        beside = torch.empty(other, dtype=torch.uint8, device=strategy.device)
        losses, peaks, on_host = [], [], []
        for number in range(steps):
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            draw = torch.Generator().manual_seed(number)
            loss = model(torch.randn(ROWS, WIDTH, generator=draw).to(strategy.device)).float().square().mean()
            strategy.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            peaks.append(torch.accelerator.max_memory_allocated() - base)
            there = residency(model)
            on_host.append(there.total("host") - there.now["host"]["buffers"])
        optimizer.state_dict()  # waits for the thread of the step, which holds the model
        assert beside.nbytes == other
        return losses, strategy.spent, peaks, on_host


@for_each(zero=(1, 3), precision=(storm("fp32"), "bf16"))
@pytest.mark.ranks([storm(1), 2], timeout=300, backend="strict", accelerator=Accelerator())
def test_accelerator_stays_within_its_budgets(zero, precision, tmp_path):
    expected, _, most, _ = trained(None, zero, precision)
    for memory in (
        {"device": int(0.8 * max(most)), "host": 2**30},
        {"device": int(0.6 * max(most)), "host": 800_000, "disk": 2**30, "path": str(tmp_path)},
    ):
        losses, spent, peaks, on_host = trained(memory, zero, precision)
        assert all(map(torch.equal, losses, expected))
        assert max(peaks[1:]) <= memory["device"], str(spent)
        assert max(on_host) <= memory["host"], str(spent)
        assert spent.shares.part("optimizer") == pytest.approx(1)
        assert "link: a step copies " in str(spent)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=300, backend="strict", accelerator=Accelerator())
def test_parameters_leave_an_accelerator_for_its_host_only(tmp_path):
    expected, *_ = trained(None, 3)
    _, spent, *_ = trained({"device": 2**30, "host": 2**30}, 3)
    state = spent.state - spent.kinds.get("other tensors", 0)
    reserved = 590_000  # inputs of layers, one layer that runs again, and tensors that only the first step counts
    device = int(state - 0.5 * spent.kinds["parameters"]) + reserved
    memory = {"device": device, "host": 2**30, "disk": 2**30, "path": str(tmp_path), "activations": reserved}
    losses, less, peaks, _ = trained(memory, 3)
    assert all(map(torch.equal, losses, expected))
    assert less.shares.parts["parameters"]["host"] > 0
    assert not less.shares.parts["parameters"].get("disk")
    assert max(peaks[1:]) <= memory["device"], str(less)
    memory |= {"host": 1000}
    with pytest.raises(ValueError, match=r"the budget of the host is 1\.0 kB"):
        trained(memory, 3)


@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator())
def test_other_tensors_take_their_part_of_the_budget():
    _, _, most, _ = trained(None, 1)
    memory = {"device": int(0.7 * max(most)), "host": 2**30}
    _, alone, *_ = trained(memory, 1)
    memory["device"] += 400_000
    _, spent, peaks, _ = trained(memory, 1, other=400_000)
    assert "other: " in str(spent)
    assert spent.activations == pytest.approx(alone.activations, abs=2000)
    assert max(peaks[1:]) <= memory["device"], str(spent)
