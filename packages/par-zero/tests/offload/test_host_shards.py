"""Parameters on the host of an accelerator, at stage 3: each unit fetches its shard before it is gathered."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_testing import Accelerator, Costs, device_times, for_each, storm, waits_seen
from par_zero import Offload, program, residency, shard, summon

from ..helpers import assert_same

SHARDS = Offload(optimizer="host", parameters="host", piece="8KiB")
BF16 = {"param_dtype": torch.bfloat16}
WIDTH = 64

on_device = pytest.mark.ranks([storm(1), 2], backend="strict", accelerator=Accelerator())


class Layers(nn.Module):
    """Layers that are called in any order, some twice, with a frozen one among them."""

    def __init__(self, width=WIDTH, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x, order=(0, 1, 2, 3), *, recompute=False):
        x = x.to(self.frozen.weight.dtype)
        for number in order:
            layer = self.layers[number]
            x = self.frozen((checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)).relu())
        return x


def made(offload, precision=None, **options):
    torch.manual_seed(0)
    module = Layers().to("strict")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2, fused=True)
    how = {"overlap": {"bucket": 1}, "precision": precision, **options}
    return shard(module, optimizer, stage=3, group=dist.group.WORLD, offload=offload, **how)


def whole(module):
    with summon(module):
        return {name: parameter.detach().cpu() for name, parameter in module.named_parameters()}


def batches(count=6):
    draw = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, WIDTH, generator=draw).to("strict") for _ in range(count)]


def in_two_orders(offload, precision):
    """Losses and parameters of steps in two orders, with evaluations between them."""
    module, optimizer = made(offload, precision)
    found = {}
    given = batches()
    waits_seen()
    for step, batch in enumerate(given):
        with torch.no_grad():
            found[f"evaluated {step}"] = module(batch).float().square().mean()
        order = ((0, 1, 2, 3), (3, 1, 1, 0, 2))[step % 2]
        loss = module(batch, order, recompute=step > 3).float().square().mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    assert not waits_seen()
    return {name: value.cpu() for name, value in found.items()} | whole(module)


@for_each(precision=(None, BF16))
@on_device
def test_two_orders_and_evaluation_give_the_same_bits(precision):
    assert_same(in_two_orders(SHARDS, precision), in_two_orders(None, precision))


def written_between(offload, precision, root=None):
    """Parameters after writes to freed parameters, loads and checkpoints between late steps."""
    module, optimizer = made(offload, precision)

    def step(batch):
        module(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second, third, *_ = batches()
    step(first)
    with torch.no_grad():
        module.layers[1].weight.copy_(torch.full((WIDTH, WIDTH), 0.01, dtype=module.layers[1].weight.dtype))
    step(second)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    step(third)
    module.load_state_dict(state)
    with summon(module), torch.no_grad():
        module.layers[2].weight.mul_(0.5)
    step(first)
    module.to(module.layers[0].weight.device)  # changes nothing
    found = whole(module)
    if root is not None:
        checkpoint_ = pytest.importorskip("par_checkpoint")
        checkpoint_.save(root, model=module, optimizer=optimizer)
        step(second)
        checkpoint_.load(root, model=module, optimizer=optimizer)
        assert_same(whole(module), found)
        step(second)
        found |= {f"{name} then": value for name, value in whole(module).items()}
    return found


@for_each(precision=(None, BF16))
@on_device
def test_writes_loads_and_saves_find_the_shards(precision, tmp_path):
    root = tmp_path / ("fp32" if precision is None else "bf16")
    offloaded = written_between(SHARDS, precision, root / "with")
    assert_same(offloaded, written_between(None, precision, root / "without"))


@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_checkpoint_with_parameters_on_host_loads_without(tmp_path):
    checkpoint_ = pytest.importorskip("par_checkpoint")
    module, optimizer = made(SHARDS)
    module(batches()[0]).square().mean().backward()
    optimizer.step()
    checkpoint_.save(tmp_path / "files", model=module, optimizer=optimizer)
    # The optimizer steps the shards themselves, so the files have no master weights.
    other, other_optimizer = made(None)
    checkpoint_.load(tmp_path / "files", model=other, optimizer=other_optimizer)
    assert_same(whole(other), whole(module))


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_parameters_without_an_optimizer_are_fetched():
    torch.manual_seed(0)
    module = Layers().to("strict").requires_grad_(False)
    with torch.no_grad():
        expected = module(batches()[0]).cpu()
    before = torch.accelerator.memory_allocated()
    shard(module, stage=3, group=dist.group.WORLD, offload={"parameters": "host"}, overlap={"bucket": 1})
    assert torch.accelerator.memory_allocated() < before / 8
    with torch.no_grad():
        assert module(batches()[0]).cpu().equal(expected)


# A copy takes as many seconds as it has bytes.
@for_each(precision=(None, BF16))
@pytest.mark.ranks([1, 2], backend="strict", accelerator=Accelerator(costs=Costs(link=1.0, latency=0.0)))
def test_link_moves_the_bytes_of_the_formula(precision):
    module, optimizer = made(SHARDS, precision)
    for batch in batches(4):
        device_times()
        loss = module(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()  # waits for the thread
        spans = device_times().timeline
    into, out = (sum(span.end - span.begin for span in spans if span.kind.endswith(name)) for name in ("into", "out"))
    done, ranks = program(module), dist.get_world_size()
    fetched = sum(done.units[entry.of] for entry in done.entries if entry.op == "gather")
    # The updated parameters stay on the host, so only fetches move them.
    assert into == pytest.approx(fetched / ranks, abs=64)
    assert out == pytest.approx(4 * WIDTH**2 * (4 if precision is None else 2) / ranks, abs=64)


@pytest.mark.ranks([storm(1), 2], backend="strict", accelerator=Accelerator())
def test_device_holds_what_the_program_predicts():
    module, optimizer = made(SHARDS)
    size = sum(parameter.numel() * 4 for parameter in module.parameters())
    for batch in batches(3):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    held, activations = residency(module).now, 64 * 4 * WIDTH * 4
    assert held["device"]["parameters"] == 0
    assert size / dist.get_world_size() <= held["host"]["parameters"] <= 1.02 * size
    assert held["host"]["copies"] == 0
    predicted = sum(program(module).peak().values())
    assert predicted <= torch.accelerator.max_memory_allocated() <= predicted + activations


@pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
def test_tiers_without_a_way_to_the_device_raise_errors(tmp_path):
    class Named(nn.Parameter):
        pass

    def sharded(parameter=nn.Parameter, stage=3, **offload):
        module = nn.Linear(4, 4, device="strict")
        module.weight = parameter(module.weight.detach())
        optimizer = torch.optim.AdamW(module.parameters())
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, offload=offload)

    with pytest.raises(ValueError, match="pass parameters='host'"):
        sharded(parameters="disk", optimizer="host", path=tmp_path)
    with pytest.raises(ValueError, match="pass optimizer='host', or remove parameters"):
        sharded(parameters="host", optimizer=0.5)
    with pytest.raises(ValueError, match="'weight' is a Named"):
        sharded(Named, parameters="host", optimizer="host")
    with pytest.raises(ValueError, match="parameters='host' needs stage 3"):
        sharded(stage=2, parameters="host", optimizer="host")
