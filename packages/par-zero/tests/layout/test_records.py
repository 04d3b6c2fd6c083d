"""Records: over the group every element of every parameter, gradient and moment is said to be somewhere, once."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import (
    ProcessGroups,
    Sharding,
    Topology,
    check_owned,
    gradients,
    part_of,
    segments_of,
    set_sharding,
    sharding_of,
    written_,
)
from par_groups import whole as all_of
from par_testing import for_each
from par_zero import DataParallelGroup, shard
from par_zero.layout import records

from ..helpers import (
    STAGES,
    adamw,
    batch,
    for_each_stage,
    joint,
    loss_of,
    mlp,
    sgd,
    sharded,
    train,
    uneven,
    whole,
)


def held(optimizer):
    """What this rank's flat tensors hold, by name; two tensors may hold parts of one parameter."""
    found = {}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            for segment in segments_of(tensor):
                before = found.get(segment.name, Sharding(segment.sharding.shape, ()))
                found[segment.name] = Sharding(before.shape, before.boxes + segment.sharding.boxes)
    return found


def check_once(optimizer, module_names):
    named = held(optimizer)
    check_owned(named.items())
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, sorted(named))
    assert set().union(*every) == set(module_names)


@for_each(stage=STAGES, atomic=(False, True))
@pytest.mark.ranks([1, 4])
def test_the_optimizers_tensors_hold_each_parameter_once(stage, atomic):
    _, optimizer = sharded(uneven(), stage, atomic=atomic)
    check_once(optimizer, dict(uneven().named_parameters()))


@for_each_stage
@pytest.mark.ranks(4)
def test_gradients_are_found_under_their_names(stage):
    module, optimizer = sharded(uneven(), stage)
    reference = uneven()
    loss_of(module, batch(0)).backward()
    loss_of(reference, joint(0)).backward()
    counted = {name: torch.zeros(each.shape) for name, each in reference.named_parameters()}
    for name, box, view in gradients(optimizer):
        if box.owns(dist.get_rank(), range(dist.get_world_size())):
            counted[name][box.slices] += 1
        expected = reference.get_parameter(name).grad
        expected = torch.zeros(view.shape) if expected is None else expected[box.slices]
        torch.testing.assert_close(view, expected, rtol=1e-4, atol=1e-7)  # the mean of means
    for name, each in counted.items():
        dist.all_reduce(each)
        assert torch.equal(each, torch.ones_like(each)), name


@for_each_stage
@pytest.mark.ranks(2)
def test_what_is_written_to_a_gradient_reaches_the_step(stage):
    module, optimizer = sharded(mlp(), stage, lambda p: torch.optim.SGD(p, lr=1.0))
    loss_of(module, batch(0, width=8)).backward()
    for _, _, view in gradients(optimizer):
        view.fill_(0.5)
    optimizer.step()
    for name, value in whole(module).items():
        assert torch.equal(value, mlp().get_parameter(name).detach() - 0.5)


@for_each_stage
@pytest.mark.ranks(2)
def test_tied_parameters_have_one_record(stage):
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    module[1].weight = module[0].weight
    _, optimizer = sharded(module, stage)
    check_once(optimizer, ["0.weight", "0.bias", "1.bias"])


@for_each_stage
@pytest.mark.ranks(4)
def test_hybrid_records_count_once_over_the_world_and_over_a_group(stage):
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    module = uneven()
    optimizer = sgd(module.parameters())
    shard(module, optimizer, stage=stage, group=pairs[rank // 2], replicas=replicas)
    check_once(optimizer, dict(uneven().named_parameters()))
    check_owned(held(optimizer).items(), pairs[rank // 2])
    check_owned((name, sharding_of(each)) for name, each in module.named_parameters())
    for _, each in module.named_parameters():
        for box in sharding_of(each).boxes:
            expected = {rank, (rank + 2) % 4} if stage == 3 else set(range(4))
            assert set(box.copies) == expected


@for_each_stage
@pytest.mark.ranks(2)
def test_parameters_written_from_outside_reach_the_masters(stage):
    module, optimizer = sharded(mlp(), stage, adamw, param_dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in module.parameters():
            part_of(parameter).fill_(0.25)
    written_(module.parameters())
    train(module, optimizer, [[batch(0, width=8).bfloat16()]])
    for each in whole(module).values():  # AdamW's first step is lr at most, and decay
        torch.testing.assert_close(each.float(), torch.full_like(each.float(), 0.25), rtol=0, atol=0.012)


@for_each_stage
@pytest.mark.ranks(2)
def test_moments_lie_like_the_parameters(stage):
    module, optimizer = sharded(mlp(), stage, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    train(module, optimizer, [[batch(step, width=8)] for step in range(2)])
    train(reference, its, [[joint(step, width=8)] for step in range(2)])
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            for name, box, view in segments_of(tensor).views(optimizer.state[tensor]["momentum_buffer"]):
                expected = its.state[reference.get_parameter(name)]["momentum_buffer"][box.slices]
                torch.testing.assert_close(view, expected, rtol=1e-4, atol=1e-6)  # the mean of means


@for_each_stage
@pytest.mark.ranks(2)
def test_a_record_that_was_there_is_cut_further(stage):
    """A model that is cut by rows already, each half on a rank of its own: here both ranks hold the upper half."""
    from par_groups import Box, set_sharding

    module = nn.Linear(4, 3, bias=False)
    ranks = range(dist.get_world_size())
    set_sharding(module.weight, Sharding((6, 4), (Box((0, 0), (3, 4), 0, (4, 1), tuple(ranks)),)))
    _, optimizer = sharded(module, stage)
    record = held(optimizer).get("weight", Sharding((6, 4), ()))
    assert record.shape == (6, 4)
    owned = torch.tensor(record.owned(dist.get_rank(), ranks))
    dist.all_reduce(owned)
    assert owned == 12


class CountingStore:
    """Counts the round trips to a store, in which every rank of a simulated world has left the share that it keeps."""

    def __init__(self, share_of):
        self.trips, self._share_of = 0, share_of

    def add(self, _, amount):
        self.trips += 1
        return amount

    def set(self, *_):
        self.trips += 1

    def get(self, key):
        self.trips += 1
        return str(self._share_of(int(key.rpartition("/")[2]))).encode()

    def multi_get(self, keys):
        self.trips += 1
        return [str(self._share_of(int(key.rpartition("/")[2]))).encode() for key in keys]

    def has_extended_api(self):
        return True


@pytest.mark.ranks(1, init=False)
def test_who_keeps_a_share_is_asked_in_few_round_trips_or_none(monkeypatch):
    """512 data ranks of 8 tensor ranks each: a bias that is alike on all of a tensor group has 4096 copies."""
    dist.init_process_group("fake", rank=77, world_size=4096)
    topology = Topology({"data": 512, "tensor": 8})
    with ProcessGroups(topology) as groups:
        store = CountingStore(lambda rank: topology.index("data", rank))
        monkeypatch.setattr(records, "default_store", lambda: store)
        bias, other = all_of((3,), range(4096)), all_of((3,), (77, 78))
        for share_of, trips in ((None, 6), (partial(topology.index, "data"), 0)):
            same = records.SameShare(groups["data"], None, share_of)
            assert same.of(bias) == set(topology.group("tensor", 77))
            assert same.of(other) == {77, 78}
            assert same.of(bias) == set(topology.group("tensor", 77))  # known by now
            assert store.trips == trips
            store.trips = 0


@pytest.mark.ranks(4)
def test_replicas_ask_no_store(monkeypatch):
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    monkeypatch.setattr(records, "default_store", None)  # whoever asks it fails
    same = records.SameShare(pairs[rank // 2], replicas)
    assert same.of(all_of((3,), range(4))) == {rank % 2, rank % 2 + 2}


@pytest.mark.ranks(4)
def test_ranks_that_share_are_the_same_whoever_says_it():
    """All of the weight lies on the first data rank; the other one must leave its word all the same."""
    rank = dist.get_rank()
    found = []
    with ProcessGroups(Topology({"data": 2, "tensor": 2})) as groups:
        for share_of in (None, lambda rank: rank // 2):
            module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
            for layer in module:
                set_sharding(layer.weight, all_of((3, 3), range(4)))
            set_sharding(module[1].weight, all_of((3, 3), (rank, (rank + 2) % 4)))
            group = DataParallelGroup(groups["data"], index_of=share_of)
            _, optimizer = shard(module, sgd(module.parameters()), stage=1, group=group)
            found.append(held(optimizer))
        assert found[0] == found[1]
        wrong = DataParallelGroup(groups["data"], index_of=lambda _: 0 if rank > 1 else rank // 2)
        with pytest.raises(ValueError, match=r"index_of\([23]\)=0: this rank is number 1 of its group"):
            shard(nn.Linear(3, 3), stage=3, group=wrong)
