"""Parameters that not all ranks have, such as experts: those who have them share them, in one order with the rest."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import check_owned, segments_of, set_sharding, sharding_of, whole
from par_testing import Strict, count_collectives, for_each, once, storm
from par_zero import DataParallelGroup, shard, summon
from par_zero._collectives import same_ranks

from .helpers import adamw, for_each_stage, policies
from .routed import Routed, accumulate, holding, loss_of, norm_of, part_of, subgroup

EXACT = {"rtol": 1e-9, "atol": 1e-10}
"""Of fp64: some roundings of sums in another order, which AdamW divides by roots of small moments."""


def alone(ranks, left_out, *, steps=3, microbatches=1):
    """The model on one device after some steps, and the norm of the gradients of each."""
    module = Routed()
    optimizer = adamw(module.parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(microbatches):
            losses = [loss_of(module, step, rank, ranks, left_out(step, rank), micro) for rank in range(ranks)]
            (sum(losses) / ranks).backward()
        norms.append(torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).norm())
        optimizer.step()
    return module, norms


def together(parallel, stage, left_out, *, microbatches=1, bucket=300, steps=3, deferred=False, **groups):
    """The same over ranks that have some of the experts each."""
    module = Routed(parallel)
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, **policies(bucket=bucket, **groups))
    rank, ranks, norms = dist.get_rank(), dist.get_world_size(), []
    for step in range(steps):
        optimizer.zero_grad()
        accumulate(
            module,
            lambda micro, step=step: loss_of(module, step, rank, ranks, left_out(step, rank), micro),
            microbatches,
            deferred=deferred,
        )
        norms.append(norm_of(optimizer))
        optimizer.step()
    return module, norms


def assert_like_alone(result, expected, parallel):
    torch.testing.assert_close(result[1], expected[1], **EXACT)
    with summon(result[0]):
        for (name, mine), value in zip(result[0].named_parameters(), expected[0].parameters(), strict=True):
            torch.testing.assert_close(
                mine, part_of(name, value, parallel), **EXACT, msg=lambda text, name=name: name + text
            )


def owned(optimizer):
    """What this rank's tensors hold, each under a name of its own, as one may be cut into several."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return [(each.name, each.sharding) for tensor in tensors for each in segments_of(tensor)]


class Three(nn.Module):
    """Three linears in fp64, of which a rank may leave one out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(dist.get_rank() // 2)
        self.linears = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, left_out):
        for number, linear in enumerate(self.linears):
            x = x if number == left_out else torch.tanh(linear(x))
        return x


def everything(step, rank):
    """No rank leaves out anything."""


def above_and_below(step, rank):
    """After the first step, one rank leaves out a linear above the experts, and then another one below."""
    return {(1, 1): 5, (2, 1): 0, (1, 0): 3}.get((step, rank))


def check(parallel, stage, left_out, *, microbatches=1, steps=3, **options):
    expected = once(alone, dist.get_world_size(), left_out, microbatches=microbatches, steps=steps)
    result = together(parallel, stage, left_out, microbatches=microbatches, steps=steps, **options)
    assert_like_alone(result, expected, parallel)


@for_each(stage=(0, 1, storm(2), 3), left_out=(storm(everything), above_and_below))
@pytest.mark.parametrize("parallel", [2, 4])
@pytest.mark.ranks(4)
def test_experts_train_as_on_one_device(stage, left_out, parallel):
    check(parallel, stage, left_out, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holding(parallel))])


@for_each(stage=(1, 3), deferred=(False, True), bucket=(1, 10_000))
@pytest.mark.ranks(2)
def test_experts_train_by_several_backwards_in_chunks_of_any_size(stage, deferred, bucket):
    options = {"group": dist.group.WORLD, "expert_groups": [DataParallelGroup(holding(2))]}
    check(2, stage, above_and_below, microbatches=2, deferred=deferred, bucket=bucket, **options)


@for_each(stage=(0, storm(1), storm(2), 3))
@pytest.mark.ranks(4)
def test_experts_train_under_hybrid_sharding(stage):
    """Neighbours share, and the ranks two further keep the same: of experts either all of one, or a part each."""
    near, far, alone_ = subgroup((0, 1), (2, 3)), subgroup((0, 2), (1, 3)), subgroup((0,), (1,), (2,), (3,))
    for others in ([DataParallelGroup(alone_, replicas=far)], [DataParallelGroup(far)]):
        check(2, stage, above_and_below, group=near, replicas=far, expert_groups=others)


def anywhere(step, rank):
    """From the first step on ranks leave out linears above, between and below the experts, also different ones."""
    left_out = [(None, 5), (None, 3, None, 0), (3, 0, 5), (5, 2, None, 3), (None, 3, 2), (0, 5, None, 3)]
    return dict(enumerate(left_out[step])).get(rank)


def anywhere_at_once(step, rank):
    """The rank whose order is learned leaves out something from the first step on, too."""
    return {(0, 0): 3, (0, 1): 5, (1, 0): 5, (2, 1): 0, (3, 0): 3, (3, 1): 2, (4, 0): 3, (4, 1): 2}.get((step, rank))


ONE_AT_A_TIME = {"backend": "strict", "strict": Strict(slots=1)}
"""One communicator of a rank goes on at a time: what falls in another order on another rank stops both for good."""


@for_each(stage=(0, 1, storm(2)), left_out=(anywhere, storm(anywhere_at_once)))
@pytest.mark.ranks(2, **ONE_AT_A_TIME)
def test_below_stage_3_reductions_and_exchanges_have_one_order_on_all_ranks(stage, left_out):
    check(2, stage, left_out, steps=6, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holding(2))])


@for_each(stage=(storm(0), 1, storm(2)), parallel=(2, storm(4)))
@pytest.mark.ranks(4, **ONE_AT_A_TIME)
def test_each_of_four_ranks_may_leave_out_something_else(stage, parallel):
    check(
        parallel, stage, anywhere, steps=4, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holding(parallel))]
    )


@for_each(stage=(storm(0), 1, storm(2)), deferred=(storm(False), True), bucket=(300, storm(10_000)))
@pytest.mark.ranks(2, **ONE_AT_A_TIME)
def test_several_backwards_have_one_order_whether_or_not_each_is_reduced(stage, deferred, bucket):
    options = {
        "group": dist.group.WORLD,
        "expert_groups": [DataParallelGroup(holding(2))],
        "deferred": deferred,
        "bucket": bucket,
    }
    check(2, stage, anywhere, microbatches=2, steps=4, **options)


@pytest.mark.storm
@for_each(stage=(0, 1, 2))
@pytest.mark.ranks(4, **ONE_AT_A_TIME)
def test_below_stage_3_hybrid_sharding_of_experts_has_one_order_on_all_ranks(stage):
    near, far, single = subgroup((0, 1), (2, 3)), subgroup((0, 2), (1, 3)), subgroup((0,), (1,), (2,), (3,))
    for others in ([DataParallelGroup(single, replicas=far)], [DataParallelGroup(far)]):
        check(2, stage, anywhere, steps=4, group=near, replicas=far, expert_groups=others)


def run(module, optimizer, steps, losses_at):
    """Steps of SGD, each by the sum of some losses, all of which are computed and then gone through backward."""
    for step in range(steps):
        optimizer.zero_grad()
        sum(losses_at(step)).backward()
        optimizer.step()
    return module, []


def descending(module):
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.05)


def compare_with_one_device(change, losses_of, *, stage, steps, parallel=2):
    """Trains a changed model over ranks and on one device.

    Args:
        change: Changes the model before it is sharded.
        losses_of: The loss of a rank from the model, the step and the rank.
        stage: The stage.
        steps: How many steps.
        parallel: How many ranks have all experts between them.
    """
    ranks, modules = dist.get_world_size(), [Routed(), Routed(parallel)]
    for module in modules:
        change(module)
    optimizers = [descending(module) for module in modules]
    shard(
        modules[1],
        optimizers[1],
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(holding(parallel))],
        overlap={"bucket": 300},
    )
    alone_, together_ = zip(modules, optimizers, strict=True)
    expected = run(*alone_, steps, lambda step: [losses_of(alone_[0], step, rank) / ranks for rank in range(ranks)])
    result = run(*together_, steps, lambda step: [losses_of(together_[0], step, dist.get_rank())])
    assert_like_alone(result, expected, parallel)


@for_each(stage=(storm(0), 1, storm(2)), block=(storm(1), 4), weight=("up", storm("down")))
@pytest.mark.ranks(4, **ONE_AT_A_TIME)
def test_experts_of_one_rank_may_get_no_gradient(stage, block, weight):
    """In some steps all experts of one rank use a weight without asking for its gradient, and their copies do not."""
    ranks, parallel = dist.get_world_size(), 2

    def losses_of(module, step, rank):
        # Rows of a rank go to the experts of those that it exchanges with; of these one leaves the weight out.
        absent = {2: 0, 3: 3, 4: 1}.get(step)
        near = absent is not None and absent // parallel == rank // parallel
        module.blocks[block].experts.without = (weight, absent % parallel) if near else None
        return loss_of(module, step, rank, ranks)

    compare_with_one_device(lambda _: None, losses_of, stage=stage, steps=5)


@for_each(stage=(storm(0), 1, storm(2)), frozen=(storm(1), 4))
@pytest.mark.ranks(2, **ONE_AT_A_TIME)
def test_an_exchange_of_what_is_not_trained_separates_reductions_too(stage, frozen):
    ranks = dist.get_world_size()

    def losses_of(module, step, rank):
        return loss_of(module, step, rank, ranks, anywhere(step, rank))

    compare_with_one_device(lambda module: module.blocks[frozen].requires_grad_(False), losses_of, stage=stage, steps=6)


@for_each(stage=(storm(0), 1, storm(2)))
@pytest.mark.ranks(2, **ONE_AT_A_TIME)
def test_a_weight_may_be_read_outside_of_its_module_when_backward_has_left_that_behind(stage):
    """It is reduced when its last gradient is there, though its module was called later, or not at all."""
    ranks = dist.get_world_size()

    def losses_of(module, step, rank):
        linears = module.blocks[5 if step % 2 else 3], module.blocks[0]
        read = [linears[0].weight.square().sum(), module.blocks[4].dense(linears[1].weight).square().sum()]
        return loss_of(module, step, rank, ranks, anywhere(step, rank)) + sum(read) / 10

    compare_with_one_device(lambda _: None, losses_of, stage=stage, steps=6)


@for_each(stage=(storm(0), 1, storm(2)), bound=(2, 1000))
@pytest.mark.ranks(2)
def test_reductions_that_are_bounded_are_not_held_back(stage, bound):
    """Below as many as there are chunks, as else more gradients would wait than the bound allows for."""
    module = Routed(2)
    shard(
        module,
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(holding(2))],
        overlap={"bucket": 1, "inflight": bound},
    )
    with count_collectives() as counted:
        begun = []
        module.blocks[0].register_full_backward_pre_hook(lambda *_: begun.append(len(counted.events)))
        loss = loss_of(module, 0, dist.get_rank(), 2)
        before = len(counted.events)
        loss.backward()
    of_rows = 4
    assert (begun[0] - before > of_rows) == (bound == 2)


@for_each(stage=(0, 1, storm(2)))
@pytest.mark.ranks(2)
def test_below_stage_3_reductions_begin_while_backward_goes_on_once_their_order_is_agreed_on(stage):
    """Two passes agree, for which nothing more is exchanged where all ranks call the modules in their order."""
    module = Routed(2)
    optimizer = adamw(module.parameters())
    shard(
        module,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(holding(2))],
        overlap={"bucket": 1},
    )
    begun, exchanged = [], []
    for step in range(4):
        with count_collectives() as counted:
            note = module.blocks[0].register_full_backward_pre_hook(lambda *_: begun.append(len(counted.events)))
            loss = loss_of(module, step, dist.get_rank(), 2)
            begun.append(len(counted.events))
            loss.backward()
            optimizer.step()
        note.remove()
        optimizer.zero_grad()
        exchanged.append(len(counted.events))
    before, at_last_block = begun[::2], begun[1::2]
    of_rows, of_linears_above = 4, 3 * 2 + 4
    during = [last - first - of_rows for first, last in zip(before, at_last_block, strict=True)]
    assert during[:2] == [0, 0]
    assert all(count >= of_linears_above for count in during[2:]), during
    assert len(set(exchanged)) == 1, exchanged


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_at_stage_3_reductions_gatherings_and_exchanges_have_one_order_on_all_ranks():
    """One communicator goes on at a time: what falls in another order on another rank would stop both for good."""
    check(2, 3, above_and_below, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holding(2))])


@pytest.mark.storm
@pytest.mark.ranks(4, backend="strict", strict=Strict(slots=1))
def test_at_stage_3_hybrid_sharding_of_experts_has_one_order_on_all_ranks():
    near, far, single = subgroup((0, 1), (2, 3)), subgroup((0, 2), (1, 3)), subgroup((0,), (1,), (2,), (3,))
    for others in ([DataParallelGroup(single, replicas=far)], [DataParallelGroup(far)]):
        check(2, 3, above_and_below, group=near, replicas=far, expert_groups=others)


@for_each(stage=(storm(0), 1, storm(2), 3))
@pytest.mark.ranks(2, **ONE_AT_A_TIME)
def test_two_forwards_before_one_backward_exchange_as_on_one_device(stage):
    """In the first step all ranks call everything, as stage 3 wants it."""
    ranks = dist.get_world_size()

    def losses_of(module, step, rank):
        left_out = anywhere(step, rank) if step else None
        return sum(loss_of(module, step, rank, ranks, left_out, micro) for micro in (0, 1))

    compare_with_one_device(lambda _: None, losses_of, stage=stage, steps=6)


@for_each(stage=(1, 3))
@pytest.mark.ranks(4)
def test_sums_are_divided_as_the_share_says_and_those_beyond_the_first_group_take_part(stage):
    """Two models, each of two ranks, with one linear in common, whose gradients are sums over all ranks."""
    rank, pair = dist.get_rank(), subgroup((0, 1), (2, 3))
    module = Three()
    for linear, holders in zip(module.linears, (dist.get_process_group_ranks(pair), range(4)), strict=False):
        for parameter in linear.parameters():
            set_sharding(parameter, whole(tuple(parameter.shape), tuple(holders)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    share = DataParallelGroup(dist.group.WORLD, divisor=3, parameters=list(module.linears[1].parameters()))
    shard(module, optimizer, stage=stage, group=pair, expert_groups=[share], overlap={"bucket": 1})
    copy = Three()
    with summon(module):
        copy.load_state_dict(module.state_dict())
    for step in range(3):
        x = torch.full((2, 4), 1.0 + rank + step, dtype=torch.float64)
        for model in (module, copy):
            model.zero_grad()
            model(x, left_out=step if rank == 3 and step else None).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for number, linear in enumerate(copy.linears):
                for parameter in linear.parameters():
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(gradient, group=dist.group.WORLD if number == 1 else pair)
                    parameter.sub_(gradient, alpha=0.01 / (3 if number == 1 else 2))
    with summon(module):
        for mine, value in zip(module.parameters(), copy.parameters(), strict=True):
            torch.testing.assert_close(mine, value, **EXACT)


@for_each_stage
@pytest.mark.ranks(4)
def test_every_element_is_owned_once_whoever_shares_it(stage):
    module = Routed(2)
    optimizer = adamw(module.parameters())
    shard(
        module,
        optimizer,
        stage=stage,
        group=dist.group.WORLD,
        expert_groups=[DataParallelGroup(holding(2))],
        overlap={"bucket": 300},
    )
    check_owned(owned(optimizer))
    check_owned((name, sharding_of(each)) for name, each in module.named_parameters())


@for_each(place=(0, 2, 3, 5))
@pytest.mark.ranks(2)
def test_a_rank_may_skip_a_unit_beside_exchanges_in_the_first_pass(place):
    def skips(step, rank):
        return place if rank == (step + 1) % 2 else None

    check(2, 3, skips, group=dist.group.WORLD, expert_groups=[DataParallelGroup(holding(2))])


REFUSED = {
    "no others": ({}, ValueError, r"'blocks\.1\.experts\.up' is held by the ranks \[.\], .* pass expert_groups="),
    "of all ranks": (
        {"expert_groups": lambda: [DataParallelGroup(dist.group.WORLD)]},
        ValueError,
        r"of the ranks \[0, 1\] or \[0, 1\]",
    ),
    "no list": (
        {"expert_groups": lambda: DataParallelGroup(dist.group.WORLD)},
        TypeError,
        r"expert_groups=.* it must be a list",
    ),
    "no share": ({"expert_groups": lambda: [dist.group.WORLD]}, TypeError, r"expert_groups=.* it must be a list"),
    "divisor": (
        {"expert_groups": lambda: [DataParallelGroup(holding(2), divisor=0)]},
        ValueError,
        r"expert_groups\[0\]\.divisor=0",
    ),
    "sum": (
        {"expert_groups": lambda: [DataParallelGroup(holding(2), divisor=2)], "reduce_op": "sum"},
        ValueError,
        r"reduce_op='sum' divides by nothing; remove one",
    ),
    "replicas": (
        {"expert_groups": lambda: [DataParallelGroup(dist.group.WORLD, replicas=dist.group.WORLD)]},
        ValueError,
        r"expert_groups\[0\]\.replicas are the ranks \[0, 1\]",
    ),
    "parameters of others": (
        {"expert_groups": lambda: [DataParallelGroup(holding(2), parameters=[nn.Parameter(torch.ones(1))])]},
        ValueError,
        r"expert_groups\[0\]\.parameters: the module does not have one",
    ),
    "index of another rank": (
        {"expert_groups": lambda: [DataParallelGroup(holding(2), index_of=lambda _: 7)]},
        ValueError,
        r"expert_groups\[0\]\.index_of\(\d\)=7: this rank is number 0 of its group",
    ),
    "one rank has none": (
        {"expert_groups": lambda: [DataParallelGroup(holding(2))] if dist.get_rank() else []},
        ValueError,
        r"rank 0: ValueError: 'blocks|'blocks\.1\.experts\.up' is held",
    ),
}


@for_each(what=REFUSED)
@pytest.mark.ranks(2)
def test_what_cannot_be_shared_is_refused_on_all_ranks_before_anything_is_changed(what):
    given, kind, words = REFUSED[what]
    module = Routed(2)
    optimizer = adamw(module.parameters())
    holding(2)
    options = {name: value() if callable(value) else value for name, value in given.items()}
    with pytest.raises(kind, match=words):
        shard(module, optimizer, **policies(**{"stage": 1, "group": dist.group.WORLD, **options}))
    others = [DataParallelGroup(holding(2))]
    shard(module, optimizer, stage=1, group=dist.group.WORLD, expert_groups=others)


@pytest.mark.ranks(2)
def test_a_share_of_more_ranks_than_the_first_must_name_its_parameters():
    """By its record a bias that two tensor ranks have is like an expert whose copies there see other tokens."""
    module = nn.Linear(4, 4)
    single = subgroup((0,), (1,))
    for given, words in (
        (None, r"expert_groups\[0\] has the ranks \[0, 1\]: they include all ranks of group, \[.\]"),
        (list(module.parameters()), r"expert_groups\[0\]\.parameters: 'weight' has no sharding metadata"),
    ):
        with pytest.raises(ValueError, match=words):
            shard(module, stage=1, group=single, expert_groups=[DataParallelGroup(dist.group.WORLD, parameters=given)])


@pytest.mark.ranks(2)
def test_ranks_with_other_parameters_are_named():
    module = Routed(2)
    if dist.get_rank():
        module.blocks[4].experts.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"rank 1 has other parameters, shapes, .* than rank 0"):
        shard(
            module,
            adamw(module.parameters()),
            stage=3,
            group=dist.group.WORLD,
            expert_groups=[DataParallelGroup(holding(2))],
        )


@pytest.mark.ranks(2)
def test_communicators_of_the_same_ranks_are_made_while_groups_come_and_go():
    """torch would name them by the number of groups that there are."""
    between = dist.new_group()
    first = same_ranks(dist.group.WORLD, "shards")
    dist.destroy_process_group(between)
    made = [first, same_ranks(dist.group.WORLD, "gathers")]
    for group in made:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == 2
