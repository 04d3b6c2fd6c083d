"""Tensor parallelism and ZeRO together: two ranks cut the model, two such pairs share the data."""

import ctypes
import resource
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Sharding, Topology, check_owned, segments_of
from par_layers import PartialGradientReducer, initialize, layer_set
from par_layers.examples import GPT
from par_testing import assert_equal_to_one_device, for_each
from par_zero import shard, summon

MODES = {"1d": {"mode": "1d"}, "by sequence": {"mode": "1d", "sequence_parallel": True}}


def gpt(layers, *, tied):
    model = GPT(layers, 29, 32, 4, 1, 12, tied=tied)
    initialize(model, seed=0)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, rows):
    return model.loss(rows[:, :-1], rows[:, 1:])


def data(step):
    return torch.randint(29, (8, 9), generator=torch.Generator().manual_seed(step))


def one_device(tied):
    model = gpt(layer_set(None), tied=tied)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, data(step)).backward()
        optimizer.step()
    return model


@for_each(stage=(0, 1, 2, 3))
@pytest.mark.parametrize("mode", [pytest.param("1d", marks=pytest.mark.storm), "by sequence"])
@pytest.mark.ranks(4, timeout=120)
def test_a_gpt_cut_by_tensor_and_zero_trains_as_on_one_device(stage, mode):
    topology = Topology.from_config({"data": 2, "tensor": {"size": 2, **MODES[mode]}}, 4)
    with ProcessGroups(topology) as groups:
        group = groups["data"]
        tied = (stage + list(MODES).index(mode)) % 2 == 1  # each of both at every stage and in every mode
        model = gpt(layer_set("auto", groups), tied=tied)
        optimizer = sgd(model)
        shard(model, optimizer, stage=stage, group=group, overlap={"bucket": 20_000})
        partial = PartialGradientReducer(optimizer, groups)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, data(step).chunk(2)[dist.get_rank(group)]).backward()
            partial.handle_gradient()
            optimizer.step()
        check_all_counted(optimizer)
        reason = "sums over ranks are in another order, over three steps"
        assert_equal_to_one_device(model, one_device(tied), rtol=1e-4, atol=1e-5, reason=reason)


TYPICAL = [(1, True), (3, False)]
ALL = list(product((0, 1, 2, 3), (False, True)))


@pytest.mark.storm
@pytest.mark.parametrize("cases", [TYPICAL, pytest.param(ALL, marks=pytest.mark.storm)], ids=["typical", "all"])
@pytest.mark.ranks(4, timeout=120)
def test_a_gpt_that_is_initialized_unit_by_unit_is_that_of_the_whole(cases):
    """Bit for bit: each element is a function of seed, name and place."""
    for stage, tied in cases:
        assert_filled_as_the_whole(stage, tied)


def assert_filled_as_the_whole(stage, tied):
    """Of one ZeRO stage, with the logits' table tied to the embedding's or of its own, after two steps."""
    with ProcessGroups(Topology.from_config({"data": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)) as groups:
        options = {"stage": stage, "group": groups["data"], "overlap": {"bucket": 20_000}}
        model = GPT(layer_set("auto", groups), 29, 32, 4, 3, 12, tied=tied)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True)
        shard(model, optimizer, init={"init_fn": lambda unit, prefix: initialize(unit, 0, prefix)}, **options)
        assert all(mine is one for mine, one in zip(model.parameters(), parameters, strict=True))
        reference = GPT(layer_set("auto", groups), 29, 32, 4, 3, 12, tied=tied)
        initialize(reference, seed=0)
        its = torch.optim.AdamW(reference.parameters(), fused=True)
        shard(reference, its, **options)
        for step in range(2):
            rows = data(step).chunk(2)[dist.get_rank(groups["data"])]
            for one, stepped in ((model, optimizer), (reference, its)):
                stepped.zero_grad()
                loss_of(one, rows).backward()
                stepped.step()
        with summon(model), summon(reference):
            for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine, other), name
        check_all_counted(optimizer)


def private_bytes():
    """What RLIMIT_DATA counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


@for_each(stage=(0, 3), filled=(False, True))
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_DATA leaves out most memory")
@pytest.mark.ranks(1)
def test_a_gpt_of_24_blocks_is_sharded_in_a_fifth_more_than_its_parameters_take(stage, filled):
    """The operating system gives no more, and a world of one keeps all of them."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: else glibc keeps memory that was given back
    model = GPT(layer_set(None), 29, 256, 4, 24, 12, tied=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    size = sum(each.nbytes for each in model.parameters())
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = private_bytes() + int(1.2 * size)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    try:
        if not filled:
            initialize(model, seed=0)
        options = {"init": {"init_fn": lambda unit, prefix: initialize(unit, 0, prefix)}} if filled else {}
        shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 2**20}, **options)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(size // 4)
        with torch.no_grad():
            assert loss_of(model, data(0)).isfinite()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def check_all_counted(optimizer):
    """Each element once over all four ranks."""
    held = {}
    for part in optimizer.param_groups:
        for tensor in part["params"]:
            for each in segments_of(tensor):
                before = held.get(each.name, Sharding(each.sharding.shape, ()))
                held[each.name] = Sharding(before.shape, before.boxes + each.sharding.boxes)
    check_owned(held.items())
