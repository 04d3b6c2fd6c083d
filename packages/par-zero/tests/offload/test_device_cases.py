"""Offload from an accelerator: limits of memory, faults of the disk, and other options beside it."""

import gc
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import settle_
from par_testing import Accelerator, Costs, device_times, for_each, storm, waits_seen
from par_zero import Offload, program, residency, shard

from ..helpers import STAGES, assert_same, whole
from .cases import failing

WIDTH, DEPTH, ROWS = 64, 8, 4
MATRIX = 4 * WIDTH * WIDTH
"""Bytes of a layer's parameters."""

HOST = {"optimizer": "host", "piece": "4KiB"}

ACTIVATIONS = (DEPTH + 1) * ROWS * WIDTH * 4
"""Bytes of the batch and of the layers' outputs."""

IN_FLIGHT = 7 * MATRIX
"""Bytes of gradients that come and go at stages 2 and 3: one as autograd makes it, two that wait for their reduction,
two sums that are received, and two sums on their way to the host.
"""

LIMIT = DEPTH * MATRIX + IN_FLIGHT + ACTIVATIONS + MATRIX
"""Bytes of the device at stage 2 with the optimizer on the host. Stage 3 also gathers two units.

The last term is for a freed matrix in which the allocator has put an activation.
"""


def layers(depth=DEPTH):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def batches(count=3):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, WIDTH, generator=draw).to("strict") for _ in range(count)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sharded(stage, offload=None, module=None, parameters=None, **policies):
    module = layers().to("strict") if module is None else module
    optimizer = adamw(parameters or module.parameters())
    policies = {"overlap": {"bucket": 1}, **policies}
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload, **policies)
    return module, optimizer


def step(module, optimizer, batch, before=None):
    loss = module(batch).square().mean()
    loss.backward()
    if before is not None:
        before()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(stage, offload=None, **policies):
    """Losses and parameters after some steps."""
    module, optimizer = sharded(stage, offload, **policies)
    found = {f"loss {n}": step(module, optimizer, batch).cpu() for n, batch in enumerate(batches())}
    return found | {name: value.cpu() for name, value in whole(module).items()}


def forget_models():
    """Free the models of earlier calls."""
    time.sleep(0.2)  # the thread of the last step holds the model
    gc.collect()
    torch.accelerator.synchronize()


def trains(stage, offload=None):
    """Whether the device has enough memory for some steps."""
    try:
        module, optimizer = sharded(stage, offload)
        for batch in batches():
            step(module, optimizer, batch)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator(limit=LIMIT))
def test_model_trains_in_the_device_memory_of_the_formula():
    assert trains(2, HOST)
    forget_models()
    assert not trains(2)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator(limit=LIMIT + 2 * MATRIX))
def test_model_at_stage_3_trains_in_the_device_memory_of_the_formula():
    assert trains(3, HOST)
    forget_models()
    assert not trains(3)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator(limit=LIMIT - DEPTH * WIDTH * WIDTH))
def test_one_byte_less_for_each_parameter_is_too_little():
    assert not trains(2, HOST)


@for_each(stage=STAGES, offload=(None, HOST, storm({**HOST, "overlap": False})))
@pytest.mark.ranks([storm(1), 2], backend="strict", accelerator=Accelerator())
def test_peak_is_predicted_and_residency_is_what_is_allocated(stage, offload):
    forget_models()
    before = torch.accelerator.memory_allocated()
    module, optimizer = sharded(stage, offload)
    inputs = batches()
    for batch in inputs:
        optimizer.state_dict()  # waits for the thread
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        step(module, optimizer, batch)
    optimizer.state_dict()
    torch.accelerator.synchronize()
    beside = before + sum(batch.nbytes for batch in inputs)
    held = residency(module)
    tensors = 4 * DEPTH  # parameter, gradient, two slots
    assert abs(torch.accelerator.memory_allocated() - beside - held.total("device")) <= 512 * tensors
    kept = sum(held.now["device"][kind] for kind in ("parameters", "optimizer", "copies"))
    predicted = kept + sum(program(module).peak().values())
    # The program has no entry for the moment at which autograd makes a gradient.
    most = predicted + MATRIX // 2 + ACTIVATIONS + 512 * 2 * DEPTH
    assert torch.accelerator.max_memory_allocated() - beside <= most


@for_each(stage=(2, 3), call=(1, storm(3)))
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_failed_write_with_a_busy_link_loses_nothing(stage, call, tmp_path, monkeypatch):
    """A rank's disk fails while gradients and parameters are under way: all ranks raise once, and no number changes."""
    expected = trained(stage)
    offload = Offload(optimizer={"host": 0.5, "disk": 0.5}, path=tmp_path, piece="4KiB", ahead=3)
    module, optimizer = sharded(stage, offload)
    raised, found = [], {}
    for number, batch in enumerate(batches()):
        if number == 1 and dist.get_rank() == 1:
            failing(monkeypatch, "pwritev", call)
        try:
            loss = module(batch).square().mean()
            loss.backward()
            found[f"loss {number}"] = loss.detach().cpu()
            optimizer.step()
        except OSError as error:
            raised.append(str(error))
            if "step" not in str(error):
                optimizer.step()
        optimizer.zero_grad()
    settle_(optimizer.param_groups[0]["params"])
    found |= {name: value.cpu() for name, value in whole(module).items()}
    assert len(raised) == 1
    assert "It stays in memory, and nothing is lost; save a checkpoint" in raised[0]
    assert_same(found, expected)


# A copy takes as many seconds as it has bytes.
@pytest.mark.ranks([1, 2], backend="strict", accelerator=Accelerator(costs=Costs(link=1.0, latency=0.0)))
def test_activations_and_optimizer_on_host_move_the_bytes_of_the_formula():
    recompute = pytest.importorskip("par_recompute")
    expected = trained(2)
    ranks = dist.get_world_size()
    module = layers().to("strict")
    module = recompute.checkpoint_layers(module, None, layers=list(module), to_host=recompute.ToHost(ahead=1))
    module, optimizer = sharded(2, HOST, module)
    found = {}
    for number, batch in enumerate(batches()):
        device_times()
        found[f"loss {number}"] = step(module, optimizer, batch).cpu()
        optimizer.state_dict()  # waits for the thread
        spans = device_times().timeline
    assert_same(found | {name: value.cpu() for name, value in whole(module).items()}, expected)
    into, out = (sum(span.end - span.begin for span in spans if span.kind.endswith(name)) for name in ("into", "out"))
    parameters, activations = DEPTH * MATRIX / ranks, ROWS * WIDTH * 4
    # The last layers' inputs come back first, so they stay.
    kept = out - parameters
    assert activations * (DEPTH - 3) <= kept <= activations * (DEPTH + 1)
    assert into - parameters == pytest.approx(kept, abs=64)


class Block(nn.Module):
    """A block that saves its input, and outputs of a norm, of a layer and of an activation function."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


TOKENS = 512
RECOMPUTED_LIMIT = DEPTH * 8 * MATRIX + 3 * 4 * MATRIX + 36 * TOKENS * WIDTH * 4
"""Parameters, three gradients of matrices, and 36 tensors of a layer's input.

A layer saves 10 such tensors, or 5 with "cheap". The running layer, its recomputation and its backward need 13 more.
"""


@pytest.mark.ranks(1, timeout=300, backend="strict", accelerator=Accelerator(limit=RECOMPUTED_LIMIT))
def test_recomputed_activations_on_host_train_under_a_limit_of_the_device():
    recompute = pytest.importorskip("par_recompute")

    def losses(policy, to_host, device="strict"):
        forget_models()
        torch.manual_seed(0)
        module = nn.Sequential(*(Block() for _ in range(DEPTH))).to(device)
        if policy is not None or to_host is not None:
            recompute.checkpoint_layers(module, policy, layers=list(module), to_host=to_host)
        optimizer = adamw(module.parameters())
        offload = HOST if device == "strict" else None
        shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=offload, overlap={"bucket": 1})
        draw = torch.Generator().manual_seed(0)
        inputs = [torch.randn(TOKENS, WIDTH, generator=draw).to(device) for _ in range(3)]
        return [step(module, optimizer, batch).item() for batch in inputs]

    for policy in (None, "cheap"):
        with pytest.raises(torch.OutOfMemoryError):
            losses(policy, None)
    found = losses("cheap", recompute.ToHost(ahead=1))
    assert found == losses(None, None, device="cpu")


@for_each(stage=STAGES)
@pytest.mark.ranks(2, timeout=300, backend="strict", accelerator=Accelerator())
def test_adapters_groups_and_a_part_that_one_rank_skips_change_no_number(stage):
    """Frozen layers with low-rank adapters in two param groups. Rank 1 does not use the last adapter."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x):
            return self.layer(x) + (self.up(self.down(x)) if self.is_used else 0)

    def run(offload):
        torch.manual_seed(0)
        module = nn.Sequential(*(Adapted() for _ in range(4))).to("strict")
        for layer in module:
            layer.is_used = layer is not module[3] or dist.get_rank() == 0
        groups = [
            {"params": [layer.down.weight for layer in module], "lr": 1e-2},
            {"params": [layer.up.weight for layer in module], "lr": 1e-3, "weight_decay": 0.1},
        ]
        module, optimizer = sharded(stage, offload, module, groups)
        found = {}
        for number, batch in enumerate(batches(4)):
            found[f"loss {number}"] = step(module, optimizer, batch).cpu()
            optimizer.param_groups[1]["lr"] *= 0.5
        return found | {name: value.cpu() for name, value in whole(module).items()}

    expected = run(None)
    for offload in (HOST, {**HOST, "optimizer": 0.5}):
        assert_same(run(offload), expected)


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_meta_model_needs_the_device_memory_of_one_unit():
    """Parameters are made on the device, unit by unit, and go to the host."""
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    with torch.device("meta"):
        module = layers()

    def init(unit, _):
        unit.to_empty(device="strict")
        for parameter in unit.parameters():
            nn.init.normal_(parameter)

    offload = {**HOST, "parameters": "host"}
    sharded(3, offload, module, init={"init_fn": init, "device": torch.device("strict")}, units=list(module))
    assert torch.accelerator.max_memory_allocated() - before <= 2 * MATRIX + 512
    assert torch.accelerator.memory_allocated() - before <= 512


@pytest.mark.storm
@for_each(stage=STAGES)
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_two_optimizers_on_the_host_change_no_number(stage):
    def run(offload):
        module = layers().to("strict")
        even, odd = ([module[n].weight for n in range(first, DEPTH, 2)] for first in (0, 1))
        optimizers = [adamw(even), torch.optim.SGD(odd, lr=0.05, momentum=0.9)]
        shard(module, optimizers, stage=stage, group=dist.group.WORLD, offload=offload, overlap={"bucket": 1})
        inputs = batches(4)
        waits_seen()
        for batch in inputs:
            module(batch).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            module.zero_grad()
        assert not waits_seen()
        return {name: value.cpu() for name, value in whole(module).items()}

    expected = run(None)
    for offload in (HOST, {**HOST, "optimizer": 0.5}):
        assert_same(run(offload), expected)


@for_each(stage=STAGES, dtype=(None, storm(torch.bfloat16)))
@pytest.mark.ranks([1, 2], backend="strict", accelerator=Accelerator())
def test_pinned_memory_is_little_more_than_what_it_holds(stage, dtype):
    pinned = []
    with pytest.MonkeyPatch.context() as patch:
        original = torch.empty

        def empty(*args, **keywords):
            made = original(*args, **keywords)
            if keywords.get("pin_memory"):
                pinned.append(made.untyped_storage().nbytes())
            return made

        patch.setattr(torch, "empty", empty)
        sharded(stage, HOST, layers(32).to("strict"), precision={"param_dtype": dtype})
    elements = 32 * WIDTH * WIDTH / (dist.get_world_size() if stage else 1)
    stored = elements * (4 + (2 if dtype else 4))  # master weights or copies of the parameters, and gradients
    assert stored <= sum(pinned) <= 1.02 * stored
