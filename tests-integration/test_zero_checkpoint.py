"""Training under ZeRO is saved at one stage and world, and goes on at another."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import par_checkpoint
from par_testing import storm
from par_zero import Offload, shard, summon

pytest.importorskip("safetensors")

STAGES = (0, 1, 2, 3)


def model(seed):
    """37 and 13: no world divides them."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(13, 37), nn.LayerNorm(37))
    return nn.Sequential(nn.Linear(37, 13), nn.Tanh(), inner, nn.Linear(37, 5))


def adamw(module):
    decayed = [each for each in module.parameters() if each.ndim > 1]
    others = [each for each in module.parameters() if each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=True)


def sharded(stage, group, *, seed=0):
    module = model(seed)
    optimizer = adamw(module)
    shard(module, optimizer, stage=stage, group=group, overlap={"bucket": 1000})
    return module, optimizer


def steps(module, optimizer, group, first, count=2):
    """Every group of ranks sees the same 8 rows in all."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in range(first, first + count):
        rows = torch.randn(8, 37, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        module(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(module):
    with summon(module):
        return {name: each.detach().clone() for name, each in module.named_parameters()}


def assert_equal(one, other):
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("stage", [storm(0), storm(1), storm(2), 3])
@pytest.mark.ranks(4, timeout=120)
def test_a_checkpoint_of_a_stage_goes_on_at_every_other_and_in_smaller_worlds(stage, tmp_path):
    world = dist.group.WORLD
    module, optimizer = sharded(stage, world)
    steps(module, optimizer, world, 0)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer, step=2).wait()
    saved = whole(module)
    steps(module, optimizer, world, 2)
    expected = whole(module)

    for other in STAGES:
        module, optimizer = sharded(other, world, seed=1)
        assert par_checkpoint.load(tmp_path / "c", model=module, optimizer=optimizer).step == 2
        assert_equal(whole(module), saved)
        steps(module, optimizer, world, 2)
        assert_equal(whole(module), expected)

    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    alone = dist.new_group([rank], use_local_synchronization=True)
    for group in (pair, alone):
        module, optimizer = sharded((stage + 1) % 4, group, seed=2)
        par_checkpoint.load(tmp_path / "c", model=module, optimizer=optimizer, group=group)
        assert_equal(whole(module), saved)
        steps(module, optimizer, group, 2)
        for name, tensor in whole(module).items():  # means of means, through AdamW's quotient
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", [storm(0), storm(1), storm(2), 3])
@pytest.mark.ranks(4, timeout=120)
def test_reshard_of_a_stage_continues_at_every_other(stage, tmp_path):
    world = dist.group.WORLD
    module, optimizer = sharded(stage, world)
    steps(module, optimizer, world, 0)
    before, moved = whole(module), []
    for other in STAGES:
        target = sharded(other, world, seed=1)
        moved.append(target)
        par_checkpoint.reshard(
            par_checkpoint.State(model=module, optimizer=optimizer),
            par_checkpoint.State(model=target[0], optimizer=target[1]),
            verify=True,
        )
        assert_equal(whole(target[0]), before)
    target = model(2), None
    optimizer_on_disk = adamw(target[0])
    offload = Offload(optimizer="disk", path=tmp_path, piece=1024)
    shard(target[0], optimizer_on_disk, stage=2, group=world, offload=offload, overlap={"bucket": 1000})
    moved.append((target[0], optimizer_on_disk))
    par_checkpoint.reshard(
        par_checkpoint.State(model=module, optimizer=optimizer),
        par_checkpoint.State(model=target[0], optimizer=optimizer_on_disk),
    )
    steps(module, optimizer, world, 2)
    expected = whole(module)
    for one, its in moved:
        steps(one, its, world, 2)
        assert_equal(whole(one), expected)


@pytest.mark.ranks(2)
def test_a_checkpoint_of_plain_training_goes_on_under_zero(tmp_path):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    reference = model(0)
    its = adamw(reference)
    steps(reference, its, alone, 0)
    path = tmp_path / f"of rank {dist.get_rank()}"
    par_checkpoint.save(path, model=reference, optimizer=its, step=2, group=alone).wait()
    dist.barrier()
    steps(reference, its, alone, 2)
    for stage in STAGES:
        module, optimizer = sharded(stage, dist.group.WORLD, seed=3)
        par_checkpoint.load(tmp_path / "of rank 0", model=module, optimizer=optimizer)
        steps(module, optimizer, dist.group.WORLD, 2)
        for name, tensor in whole(module).items():  # means of means, through AdamW's quotient
            torch.testing.assert_close(tensor, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(3, timeout=120)
def test_a_model_on_meta_gets_its_values_from_a_checkpoint(tmp_path):
    world = dist.group.WORLD

    def with_buffer(device):
        with torch.device(device):
            module = model(0)
            module[2].register_buffer("shift", torch.full((3,), 7.0))
        return module, adamw(module)

    module, optimizer = with_buffer("cpu")
    shard(module, optimizer, stage=1, group=world, overlap={"bucket": 1000})
    steps(module, optimizer, world, 0)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer, step=2).wait()
    saved = whole(module)
    steps(module, optimizer, world, 2)
    expected = whole(module)
    for stage in STAGES:
        module, optimizer = with_buffer("meta")
        parameters = list(module.parameters())
        shard(module, optimizer, stage=stage, group=world, overlap={"bucket": 1000})
        with pytest.raises(RuntimeError, match=r"'0\.weight' has no values yet.*par_checkpoint\.load"):
            module(torch.ones(2, 37))
        par_checkpoint.load(tmp_path / "c", model=module, optimizer=optimizer)
        assert_equal(whole(module), saved)
        assert module[2].shift.tolist() == [7, 7, 7]
        assert all(mine is one for mine, one in zip(module.parameters(), parameters, strict=True))
        steps(module, optimizer, world, 2)
        assert_equal(whole(module), expected)


class Parted(nn.Module):
    """Layers of which some are left out of a step, on one rank or on all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(4))

    def forward(self, x, use):
        for number in use:
            x = torch.tanh(self.layers[number](x)) + x
        return x


USES = ((0, 1, 2), (0, 2), (0, 2), (1, 2), (0, 1, 2, 3), (0, 3), (0, 1, 2, 3))
"""By step, the layers that are used; the last is used for the first time when the checkpoint was saved."""


def parted_steps(module, optimizer, group, numbers):
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for step in numbers:
        module.layers[2].weight.requires_grad_(step not in (1, 2))
        rows = torch.randn(8, 37, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        module(rows.chunk(world)[rank], USES[step]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parted(stage, group, make, **options):
    module = Parted().double()
    optimizer = make(module.parameters())
    if stage is not None:
        shard(module, optimizer, stage=stage, group=group, units=lambda _: False, overlap={"bucket": 2000}, **options)
    return module, optimizer


MAKE = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


@pytest.mark.parametrize("name", ["AdamW", *(pytest.param(each, marks=pytest.mark.storm) for each in ("NAdam", "SGD"))])
@pytest.mark.ranks(2)
def test_each_parameter_s_count_of_steps_goes_on_under_another_cut(name, tmp_path):
    world, rank = dist.group.WORLD, dist.get_rank()
    alone = dist.new_group([rank], use_local_synchronization=True)
    ways = {"plain": (None, alone), "alone": (1, alone), **{str(stage): (stage, world) for stage in STAGES}}
    typical = name == "AdamW"
    for way in ("plain", "1", "3") if typical else ways:
        stage, group = ways[way]
        module, optimizer = parted(stage, group, MAKE[name])
        parted_steps(module, optimizer, group, range(4))
        path = tmp_path / (way if group is world or rank == 0 else f"{way} too")
        par_checkpoint.save(path, model=module, optimizer=optimizer, group=group).wait()
        slots = par_checkpoint.inspect(path).optimizer
        assert len({each.rpartition(".")[0] for each in slots}) == 6  # of the last layer, which was not used, none
    reference, its = parted(None, alone, MAKE[name])
    parted_steps(reference, its, alone, range(7))
    dist.barrier()
    for way in ("plain", "1", "3") if typical else ways:
        for stage, group in ways.values():
            module, optimizer = parted(stage, group, MAKE[name])
            par_checkpoint.load(tmp_path / way, model=module, optimizer=optimizer, group=group)
            parted_steps(module, optimizer, group, range(4, 7))
            found = dict(module.named_parameters()) if stage is None else whole(module)
            for key, value in reference.named_parameters():  # sums in another order, in fp64
                torch.testing.assert_close(found[key].detach(), value.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(2, timeout=120)
def test_torch_goes_on_from_the_optimizer_file_of_state_on_a_disk(tmp_path):
    """torch matches parameters by their places in a group, which flat tensors and pieces of them had mixed up."""
    module = model(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=True)
    scratch = tmp_path / str(dist.get_rank())
    scratch.mkdir()
    offload = Offload(optimizer="disk", path=scratch, piece=1024)
    shard(module, optimizer, stage=1, group=dist.group.WORLD, offload=offload, overlap={"bucket": 1000})
    steps(module, optimizer, dist.group.WORLD, 0)
    par_checkpoint.save(tmp_path / "c", model=module, optimizer=optimizer, format=par_checkpoint.Format(style="torch"))
    steps(module, optimizer, dist.group.WORLD, 2)

    plain = model(1)
    again = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=True)
    plain.load_state_dict(torch.load(tmp_path / "c" / "model.pt", weights_only=True))
    again.load_state_dict(torch.load(tmp_path / "c" / "optimizer.pt", weights_only=True))
    for step in (2, 3):
        rows = torch.randn(8, 37, generator=torch.Generator().manual_seed(step))
        plain(rows).square().mean().backward()
        again.step()
        again.zero_grad()
    for name, tensor in whole(module).items():  # sums of two halves are rounded otherwise than one sum
        torch.testing.assert_close(plain.get_parameter(name), tensor, rtol=1e-4, atol=1e-5)
