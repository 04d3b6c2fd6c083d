"""Stage 3: what is gathered when, what is seen outside, and that memory is given back."""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from par_groups import Channels, ProcessGroups, Topology, check_owned, part_of, sharding_of, written_
from par_testing import StrictError, for_each
from par_zero import Overlap, ShardOptions, no_sync, predict_step, residency, shard, summon

from .helpers import (
    STAGES,
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
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


def buffers(module):
    """The memory of whole parameters by unit, as it is inside summon; outside, the same buffers are empty."""
    with summon(module):
        storages = [parameter.untyped_storage() for parameter in module.parameters()]
        return list({storage.data_ptr(): storage for storage in storages}.values())


def number_of_groups():
    """Those that torch knows of in this process."""
    return len(dist.distributed_c10d._world.pg_names)


def sizes(buffers):
    """Bytes that are there of whole parameters, by unit."""
    return [storage.nbytes() for storage in buffers]


@pytest.mark.ranks(4)
def test_outside_parameters_are_flat_parts_with_a_record():
    module, optimizer = sharded(uneven(), 3)
    expected = uneven()
    for _ in range(2):
        for name, parameter in module.named_parameters():
            assert part_of(parameter).ndim == 1
            record, reference = sharding_of(parameter), expected.get_parameter(name).detach()
            assert record.shape == parameter.shape == tuple(reference.shape)
            assert record.local_numel == part_of(parameter).numel()
            for box in record.boxes:
                assert torch.equal(box.of(parameter.detach()), reference[box.slices])
        check_owned((name, sharding_of(parameter)) for name, parameter in module.named_parameters())
        train(module, optimizer, [[batch(0)]])
        expected.load_state_dict(whole(module))


@pytest.mark.ranks(2)
def test_between_steps_memory_is_given_back():
    module, optimizer = sharded(uneven(), 3)
    memory = buffers(module)
    assert not any(sizes(memory))
    for step in range(3):
        loss_of(module, batch(step)).backward()
        assert not any(sizes(memory))
        optimizer.step()
        optimizer.zero_grad()
        assert not any(sizes(memory))
        with torch.no_grad():
            module(batch(step))
        assert not any(sizes(memory))
        with summon(module):
            assert all(sizes(memory))
        assert not any(sizes(memory))


@pytest.mark.ranks(2)
def test_at_most_two_units_are_gathered_beside_the_root():
    """One that runs, and one that comes next; also where they are checkpointed or evaluated."""
    module, optimizer = sharded(mlp(depth=6), 3)
    memory = buffers(module)
    most = 0

    def look(*_):
        nonlocal most
        most = max(most, sum(size > 0 for size in sizes(memory)))

    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(look)
            part.register_full_backward_hook(look)
    assert len(memory) == 6
    for step in range(4):
        train(module, optimizer, [[batch(step, width=8).requires_grad_()]])
        with torch.no_grad():
            module(batch(step, width=8))
    assert most == 2


class Towers(nn.Module):
    """Blocks of uneven widths, which may be checkpointed, behind a layer of the root's own."""

    def __init__(self, depth, again):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(8, 8), again
        widths = [(7, 30, 21, 30, 9)[number] for number in range(depth)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.again else block(x))
        return x


@pytest.mark.ranks(2)
@for_each(depth=(1, 2, 3, 5), again=(False, True))
def test_bytes_of_whole_parameters_are_those_of_two_neighbours_and_the_root(depth, again):
    """At the fullest moment, while one unit takes the place of another too; in later steps the next one comes early."""
    module = Towers(depth, again)
    optimizer = adamw(module.parameters())
    predicted = predict_step(module, optimizer, stage=3, ranks=2, options=ShardOptions(overlap=Overlap(bucket=1)))
    root, *units = predicted.program.units.values()
    shard(module, optimizer, stage=3, group=dist.group.WORLD, overlap={"bucket": 1})
    neighbours = max(sum(pair) for pair in zip(units, [*units[1:], 0], strict=True))
    for step in range(4):
        train(module, optimizer, [[batch(step, width=8)]])
        there = residency(module).fullest["device"]["units"]
        assert root + min(units) <= there <= root + (neighbours if step else max(units))
    assert there > root + max(units) or depth == 1, "the next one comes early"


@pytest.mark.ranks(2)
def test_under_no_sync_whole_parameters_stay():
    module, optimizer = sharded(mlp(), 3)
    memory = buffers(module)
    with no_sync(module):
        loss_of(module, batch(0, width=8)).backward()
        assert all(sizes(memory))
    loss_of(module, batch(1, width=8)).backward()
    assert not any(sizes(memory))
    optimizer.step()


@pytest.mark.ranks(2)
def test_under_no_sync_that_keeps_nothing_parameters_are_given_back_after_each_pass():
    module, optimizer = sharded(mlp(), 3)
    memory = buffers(module)
    for _ in range(2):
        with no_sync(module, keep=False):
            loss = loss_of(module, batch(0, width=8))
            assert sum(bool(size) for size in sizes(memory)) < len(memory)
            loss.backward()
            assert not any(sizes(memory))
        loss_of(module, batch(1, width=8)).backward()
        optimizer.step()


def check_parts(module, reference):
    """That the state dict has what the records say, of a reference's values."""
    for name, parameter in module.state_dict(keep_vars=True).items():
        assert part_of(parameter).numel() == sharding_of(parameter).local_numel, name
        for box in sharding_of(parameter).boxes:
            assert torch.equal(box.of(parameter.detach()), reference.get_parameter(name).detach()[box.slices]), name


@for_each(quiet=(False, True))
@pytest.mark.ranks(2)
def test_a_state_dict_between_forward_and_backward_has_parts_and_the_backward_is_right(quiet):
    module, optimizer = sharded(mlp(), 3, sgd)
    memory = buffers(module)
    reference = mlp()
    its = sgd(reference.parameters())
    for step in range(3):
        loss_of(module, batch(7, width=8))  # no backward follows
        check_parts(module, reference)
        optimizer.zero_grad()
        with no_sync(module) if quiet else nullcontext():
            loss = loss_of(module, batch(step, width=8))
            check_parts(module, reference)
            loss.backward()
            check_parts(module, reference)
        if quiet:
            loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        for _ in range(2 if quiet else 1):
            loss_of(reference, joint(step, width=8)).backward()
        its.step()
        its.zero_grad()
        reference.load_state_dict(whole(module))
        assert_near(whole(module), copies(reference))
    assert not any(sizes(memory))


@pytest.mark.ranks(2)
def test_parts_that_are_written_after_a_forward_without_backward_are_used_by_the_next():
    """Also in place of what is on its way for the backward pass that does not come."""
    module, optimizer = sharded(mlp(depth=5), 3)
    train(module, optimizer, [[batch(step, width=8)] for step in range(2)])
    other = mlp(depth=5, seed=1)
    loss_of(module, batch(7, width=8))
    for name, parameter in module.state_dict(keep_vars=True).items():
        for box in sharding_of(parameter).boxes:
            box.of(parameter.detach()).copy_(other.get_parameter(name).detach()[box.slices])
    written_(module.parameters())
    with torch.no_grad():
        assert torch.equal(module(batch(7, width=8)), other(batch(7, width=8)))
    assert_same(whole(module), copies(other))


@pytest.mark.ranks(2)
def test_summon_after_a_state_dict_shows_and_keeps_what_is_gathered():
    module, _ = sharded(mlp(), 3)
    memory = buffers(module)
    loss = loss_of(module, batch(0, width=8))
    module.state_dict()
    with summon(module):
        assert_same(copies(module), copies(mlp()))
        assert_same(dict(module.state_dict()), copies(mlp()))
    check_parts(module, mlp())
    loss.backward()
    assert not any(sizes(memory))


@pytest.mark.ranks(2)
def test_a_frozen_module_is_freed_after_a_forward_with_gradients_on():
    module = mlp().requires_grad_(False)
    shard(module, stage=3, group=dist.group.WORLD, overlap={"bucket": 300})
    memory = buffers(module)
    for _ in range(2):
        assert torch.equal(module(batch(0, width=8)), mlp()(batch(0, width=8)))
        assert not any(sizes(memory))


@pytest.mark.ranks(2)
def test_a_frozen_unit_at_the_end_of_another_stays_for_the_backward_of_both():
    """Both return the same tensor, and the frozen one waits for no gradient."""
    results = []
    for stage in (2, 3):
        module = mlp()
        for block in module:
            block[2].requires_grad_(False)
        optimizer = sgd([each for each in module.parameters() if each.requires_grad])
        units = [*module, *(block[2] for block in module)]
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, units=units)
        train(module, optimizer, [[batch(step, width=8)] for step in range(3)])
        results.append(whole(module))
    assert_same(*results)


@for_each_stage
@pytest.mark.ranks(2)
def test_summon_reads_and_writes(stage):
    module, _ = sharded(uneven(), stage)
    expected = copies(uneven())
    with summon(module):
        assert_same(copies(module), expected)
        with summon(module), torch.no_grad():
            module.first.weight.mul_(2)
        assert module.first.weight.shape == (253, 123)
        with torch.no_grad():
            module.first.weight.add_(1)
    assert_same({"": whole(module)["first.weight"]}, {"": expected["first.weight"] * 2 + 1})


@for_each_stage
@pytest.mark.ranks(2)
def test_reading_rounds_no_master(stage):
    """The optimizer's fp32 copies keep their digits when bfloat16 parameters are looked at."""
    results = []
    for look in (False, True):
        module, optimizer = sharded(mlp(), stage, param_dtype=torch.bfloat16)
        for step in range(3):
            train(module, optimizer, [[batch(step, width=8).bfloat16()]])
            if look:
                whole(module)
        results.append([each.detach().clone() for group in optimizer.param_groups for each in group["params"]])
    assert results[0][0].dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.ranks(2)
def test_an_exception_inside_summon_frees_too():
    module, _ = sharded(mlp(), 3)
    memory = buffers(module)
    with pytest.raises(KeyError), summon(module):
        raise KeyError
    assert not any(sizes(memory))


@for_each(units=("auto", "none", "linears", "first"))
@pytest.mark.ranks(2)
def test_units_are_chosen_in_every_way(units):
    module, reference = mlp(), mlp()
    how, count = {
        "auto": ("auto", 3),
        "none": ([], 1),
        "linears": (lambda each: isinstance(each, nn.Linear), 6),
        "first": ([module[0]], 2),
    }[units]
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=3, group=dist.group.WORLD, units=how, overlap={"bucket": 300})
    assert len(buffers(module)) == count
    other, its = sharded(reference, 2)
    for model, each in ((module, optimizer), (other, its)):
        train(model, each, [[batch(step, width=8)] for step in range(3)])
    assert_same(whole(module), whole(other))


@dataclass(slots=True)
class Slots:
    """What has no `__dict__`."""

    x: torch.Tensor


class Named:
    """What has a `__dict__`, in which it refers to itself."""

    def __init__(self, x):
        self.inner, self.own = [{"x": x}], self


class Private:
    """What has a slot whose name Python changes, and one that is empty."""

    __slots__ = ("__x", "unset")

    def __init__(self, x):
        self.__x = x

    def x(self):
        return self.__x


class Hiding:
    """What nobody sees through, unless torch has been told how."""

    def __init__(self, x):
        self.x = lambda: x


KINDS = {
    "dict": (lambda x: {"x": x}, lambda value: value["x"]),
    "tuple": (lambda x: (None, [x]), lambda value: value[1][0]),
    "slots": (Slots, lambda value: value.x),
    "named": (Named, lambda value: value.inner[0]["x"]),
    "private": (Private, Private.x),
    "hiding": (Hiding, lambda value: value.x()),
}
"""How a tensor is wrapped, and how it is taken out again."""


class Wrapped(nn.Module):
    """Blocks that return other things than tensors."""

    class Block(nn.Module):
        """Returns what it is told to."""

        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind = nn.Linear(8, 8), kind

        def forward(self, x):
            return KINDS[self.kind][0](torch.tanh(self.linear(x)))

    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Wrapped.Block(kind) for kind in kinds])

    def forward(self, x):
        for block in self.blocks:
            x = KINDS[block.kind][1](block(x))
        return x


def most_gathered(module, optimizer):
    """Trains three steps. How many units' parameters were there at once, at most, and after each backward."""
    memory = buffers(module)
    counts, left = [], []
    for block in module.blocks:
        for each in (block.register_forward_hook, block.linear.register_full_backward_hook):
            each(lambda *_: counts.append(sum(size > 0 for size in sizes(memory))))
    for step in range(3):
        train(module, optimizer, [[batch(step, width=8).requires_grad_()]])  # torch's hooks of backward want that
        left += sizes(memory)
    return max(counts), any(left)


@pytest.mark.ranks(2)
def test_blocks_return_dicts_tuples_dataclasses_and_objects():
    kinds = [kind for kind in KINDS if kind != "hiding"]
    module, optimizer = sharded(Wrapped(kinds), 3)
    other, its = sharded(Wrapped(kinds), 1)
    assert most_gathered(module, optimizer) == (2, False)
    train(other, its, [[batch(step, width=8)] for step in range(3)])
    assert_same(whole(module), whole(other))


@pytest.mark.ranks(2)
def test_blocks_return_what_was_registered_with_torch():
    register_pytree_node(Hiding, lambda hiding: ([hiding.x()], None), lambda leaves, _: Hiding(leaves[0]))
    kinds = ["hiding"] * 5
    module, optimizer = sharded(Wrapped(kinds), 3)
    other, its = sharded(Wrapped(kinds), 1)
    assert most_gathered(module, optimizer) == (2, False)
    train(other, its, [[batch(step, width=8)] for step in range(3)])
    assert_same(whole(module), whole(other))


@pytest.mark.ranks(2)
def test_a_unit_that_hides_its_tensors_stays_gathered_to_the_end_of_backward_and_is_named_once():
    kinds = ["dict", "hiding", "tuple", "tuple", "tuple", "tuple"]
    module, optimizer = sharded(Wrapped(kinds), 3)
    other, its = sharded(Wrapped(kinds), 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert most_gathered(module, optimizer) == (3, False)
    (warning,) = warned
    assert str(warning.message).startswith("no tensor is found in the Hiding that 'blocks.1' returns, so its param")
    train(other, its, [[batch(step, width=8)] for step in range(3)])
    assert_same(whole(module), whole(other))


@pytest.mark.ranks(2)
def test_units_are_gathered_over_the_communicator_that_is_given():
    topology = Topology({"data": 2})
    with ProcessGroups(topology, declare=[Channels("data", 1)]) as groups:
        module, other = mlp(), mlp()
        words = r"gather_group=\[[01]\]: group has the ranks \[0, 1\]; pass a comm"
        with pytest.raises(ValueError, match=words):
            shard(module, None, stage=3, group=groups["data"], overlap={"gather_group": groups[()]})
        gathers = groups[()] if dist.get_rank() == 1 else None
        words = "gather_group=" if dist.get_rank() == 1 else "rank 1: ValueError: gather_group="
        with pytest.raises(ValueError, match=words):
            shard(module, None, stage=3, group=groups["data"], overlap={"gather_group": gathers})
        (channel,) = groups.channels("data", 1)
        made = number_of_groups()
        optimizer, its = adamw(module.parameters()), adamw(other.parameters())
        shard(module, optimizer, stage=3, group=groups["data"], overlap={"gather_group": channel, "bucket": 300})
        assert number_of_groups() == made
        shard(other, its, stage=1, group=groups["data"])
        for model, each in ((module, optimizer), (other, its)):
            train(model, each, [[batch(step, width=8)] for step in range(2)])
        assert_same(whole(module), whole(other))


@pytest.mark.cpu(reason="autocast of the CPU")
@pytest.mark.ranks(2)
def test_under_autocast_parameters_of_another_dtype_are_refused_on_all_ranks():
    module, optimizer = sharded(mlp(), 3)
    other, its = sharded(mlp(), 1)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"precision=MixedPrecision\(param_dtype=torch.bfloat16\).* or stage=2"):
            module(batch(0, width=8))
        with torch.no_grad():  # nothing is kept for a backward
            assert module(batch(0, width=8)).dtype == other(batch(0, width=8)).dtype == torch.bfloat16
    other.zero_grad()
    for model, each in ((module, optimizer), (other, its)):
        train(model, each, [[batch(step, width=8)] for step in range(2)])
    assert_same(whole(module), whole(other))


class CastsInside(nn.Module):
    """A unit that runs its layers under autocast, and the first one as usual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(x)


@pytest.mark.cpu(reason="autocast of the CPU")
@pytest.mark.ranks(2)
def test_autocast_within_a_unit_is_refused_too():
    module, _ = sharded(nn.Sequential(CastsInside(), CastsInside()), 3)
    with pytest.raises(ValueError, match=r"precision=MixedPrecision\(param_dtype=torch.bfloat16\).* or stage=2"):
        module(batch(0, width=8))


@pytest.mark.cpu(reason="autocast of the CPU")
@pytest.mark.ranks(2)
def test_under_autocast_parameters_gathered_in_its_dtype_are_not_copied():
    module, optimizer = sharded(mlp(), 3, param_dtype=torch.bfloat16)
    gathered = []

    def look(tensor):
        if tensor.shape in ((8, 16), (16, 8)):
            storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
            gathered.append(tensor.untyped_storage().data_ptr() in storages)
        return tensor

    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(look, lambda kept: kept):
        loss_of(module, batch(0, width=8).bfloat16()).backward()
    assert gathered == [True] * 5  # the first weight is not needed, as the batch wants no gradient
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        train(module, optimizer, [[batch(step, width=8).bfloat16()] for step in range(2)])
    other, its = sharded(mlp(), 1, param_dtype=torch.bfloat16)
    train(other, its, [[batch(step, width=8).bfloat16()] for step in range(2)])
    assert_same(whole(module), whole(other))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(2, backend="strict")
def test_strict_ranks_tell_what_lies_in_a_flat_buffer(stage):
    """Of two collectives of equal sizes, only that tells which one is another."""
    module, optimizer = sharded(mlp(), stage)
    train(module, optimizer, [[batch(0, width=8)]])  # in a first pass at stage 3 the ranks compare what they need
    words = "'0.0.weight to 0.2.bias'" if stage == 3 else "'2.2.weight to 2.2.bias'"
    acts = (lambda: loss_of(module, batch(0, width=8)).backward(), lambda: dist.all_reduce(torch.zeros(1)))
    with pytest.raises(StrictError, match=words):
        acts[dist.get_rank()]()


@pytest.mark.cpu(reason="NumPy")
@pytest.mark.ranks(2)
def test_what_numpy_has_seen_inside_summon_does_not_stop_training():
    """Torch does not let the memory of such a tensor be given back."""
    module, optimizer = sharded(mlp(), 3, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    with summon(module):
        seen = module[0][0].weight.detach().numpy().copy()
    assert (seen == reference[0][0].weight.detach().numpy()).all()
    for step in range(2):
        train(module, optimizer, [[batch(step, width=8)]])
        train(reference, its, [[joint(step, width=8)]])
    assert_near(whole(module), copies(reference))
