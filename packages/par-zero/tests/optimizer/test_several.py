"""Several optimizers of one module, of which some must see whole tensors: at every stage as on one device."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, Sharding, gradients, set_sharding
from par_testing import count_collectives, for_each
from par_testing.optimizers import Shampoo
from par_zero import no_sync, shard

from ..helpers import (
    STAGES,
    NewtonSchulz,
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
    for_each_stage,
    joint,
    loss_of,
    matrices_and_rest,
    mlp,
    orthogonal,
    policies,
    whole,
)

MATRIX = {"Newton-Schulz": NewtonSchulz, "Shampoo": Shampoo}
EXACT = {"rtol": 0, "atol": 1e-10}  # fp64: sums in another order, and a few hundred times that through the iteration


def blocks(width=10):
    """In fp64, with a width that two ranks do not divide evenly into matrices."""
    return mlp(width=width).double()


def pair_of(module, matrix=NewtonSchulz):
    matrices, rest = matrices_and_rest(module)
    return [matrix(matrices), adamw(rest)]


def is_matrix(group):
    return "betas" not in group


def both(module, stage, make=pair_of, **options):
    optimizers = make(module)
    given = {"atomic": is_matrix, "bucket": 300, **options}
    return shard(module, optimizers, stage=stage, group=dist.group.WORLD, **policies(**given))[1]


def steps(module, optimizers, data, defer=None):
    """A step of all optimizers for each list of microbatches."""
    for microbatches in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, each in enumerate(microbatches):
            if defer is not None and number < len(microbatches) - 1:
                with defer(module):
                    loss_of(module, each.double()).backward()
            else:
                loss_of(module, each.double()).backward()
        for optimizer in optimizers:
            optimizer.step()


@functools.cache
def alone(count=3, make=pair_of, micro=1):
    module = blocks()
    data = [[joint(step, width=10, micro=number) for number in range(micro)] for step in range(count)]
    steps(module, make(module), data)
    return copies(module)


@for_each(matrix=MATRIX.values())
@pytest.mark.ranks([1, 4])
def test_one_optimizer_for_matrices_and_one_for_the_rest_train_as_on_one_device(matrix):
    expected = alone(make=lambda module: pair_of(module, matrix))
    results = []
    for stage in STAGES:
        module = blocks()
        optimizers = both(module, stage, lambda given: pair_of(given, matrix))
        assert [type(each) for each in optimizers] == [matrix, torch.optim.AdamW]
        assert all(each.ndim == 1 for each in optimizers[1].param_groups[0]["params"])  # flat: they may be cut
        steps(module, optimizers, [[batch(step, width=10)] for step in range(3)])
        results.append(whole(module))
        assert_near(results[-1], expected, **EXACT)
    for result in results[1:]:
        assert_same(results[0], result)


@for_each_stage
@pytest.mark.ranks(2)
def test_microbatches_add_up_for_all_of_them(stage):
    module = blocks()
    optimizers = both(module, stage)
    steps(module, optimizers, [[batch(step, width=10, micro=n) for n in range(3)] for step in range(2)], no_sync)
    assert_near(whole(module), alone(2, micro=3), **EXACT)


@for_each_stage
@pytest.mark.ranks(2)
def test_each_steps_and_forgets_its_own_parameters_alone(stage):
    module = blocks()
    first, second = both(module, stage)
    loss_of(module, batch(0, width=10).double()).backward()
    first.zero_grad()
    assert not list(gradients(first))
    assert list(gradients(second))
    first.step()
    second.step()
    start, after = copies(blocks()), whole(module)
    for name, value in after.items():
        assert torch.equal(value, start[name]) == (value.ndim == 2), name
    module.zero_grad()
    assert not list(gradients(second))


@for_each_stage
@pytest.mark.ranks(2)
def test_one_may_step_more_often_than_the_other(stage):
    def train(module, optimizers, data):
        for number, rows in enumerate(data):
            module.zero_grad()
            loss_of(module, rows.double()).backward()
            optimizers[0].step()
            if number % 2:
                optimizers[1].step()

    reference = blocks()
    train(reference, pair_of(reference), [joint(step, width=10) for step in range(4)])
    module = blocks()
    train(module, both(module, stage), [batch(step, width=10) for step in range(4)])
    assert_near(whole(module), copies(reference), **EXACT)


class Half(nn.Module):
    """One of its layers is used in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(10, 10).double(), nn.Linear(10, 10).double()

    def forward(self, x, both):
        x = self.one(x)
        return self.other(x) if both else x


@for_each_stage
@pytest.mark.ranks(2)
def test_what_is_unused_in_a_step_does_not_move(stage):
    def train(module, optimizers, rows):
        for step, used in enumerate((True, False, True)):
            module.zero_grad()
            module(rows(step, width=10).double(), used).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

    def make(module):
        matrices, rest = matrices_and_rest(module)
        return [NewtonSchulz(matrices), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    reference = Half()
    train(reference, make(reference), joint)
    module = Half()
    train(module, both(module, stage, make, atomic=lambda group: "nesterov" not in group), batch)
    assert_near(whole(module), copies(reference), **EXACT)


class NewtonSchulzAndSgd(NewtonSchulz):
    """One optimizer that makes the matrices of some groups orthogonal, and steps others element by element."""

    def __init__(self, module):
        matrices, rest = matrices_and_rest(module)
        super().__init__([{"params": matrices, "matrices": True}, {"params": rest, "matrices": False}])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    change = orthogonal(each.grad) if group["matrices"] else each.grad
                    each.sub_(change, alpha=group["lr"])


WHICH = {"atomic": lambda group: group["matrices"], "elementwise": lambda group: not group["matrices"]}


@for_each_stage
@pytest.mark.ranks(2)
def test_a_function_says_which_groups_of_one_optimizer_need_whole_tensors(stage):
    def make(module):
        return [NewtonSchulzAndSgd(module)]

    module = blocks()
    optimizer = make(module)[0]
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=300, **WHICH))
    assert {each.ndim for each in optimizer.param_groups[0]["params"]} <= {2}
    assert {each.ndim for each in optimizer.param_groups[1]["params"]} == {1}
    steps(module, [optimizer], [[batch(step, width=10)] for step in range(3)])
    assert_near(whole(module), alone(make=make), **EXACT)


@for_each_stage
@pytest.mark.ranks(2)
def test_several_optimizers_exchange_as_many_elements_as_one(stage):
    counts = []
    for make, atomic in ((pair_of, is_matrix), (lambda module: adamw(module.parameters()), False)):
        module = blocks(16)
        made = make(module)
        shard(module, made, stage=stage, group=dist.group.WORLD, update={"atomic": atomic})
        optimizers = made if isinstance(made, list) else [made]
        steps(module, optimizers, [[batch(0, width=16)]])
        with count_collectives() as counted:
            steps(module, optimizers, [[batch(1, width=16)]])
        counts.append(sum(each.elements for each in counted.events if each.dtype == torch.float64))
    assert counts[0] <= 1.05 * counts[1]  # padding: 16 elements for each chunk and rank


# What is refused


def refused(expected, *words, **given):
    with pytest.raises(expected) as raised:
        shard(**policies(**{"stage": 1, "group": dist.group.WORLD, **given}))
    for word in words:
        assert word in str(raised.value), str(raised.value)
    dist.barrier()  # nobody is left behind


@pytest.mark.ranks(2)
def test_mistakes_are_named_on_all_ranks():
    module = blocks()
    matrices, rest = matrices_and_rest(module)
    twice = [NewtonSchulz(matrices), adamw([*rest, matrices[0]])]
    words = ("'0.0.weight'", "param_groups[0] of the NewtonSchulz", "param_groups[0] of the AdamW", "one optimizer")
    refused(ValueError, *words, module=module, optimizer=twice, atomic=is_matrix)
    lacking = [NewtonSchulz(matrices), adamw(rest[1:])]
    words = ("'0.0.bias' wants gradients", "NewtonSchulz and the AdamW")
    refused(ValueError, *words, module=module, optimizer=lacking, atomic=is_matrix)
    refused(ValueError, "optimizer is []", module=module, optimizer=[])
    refused(TypeError, "optimizer[1] is a str", module=module, optimizer=[adamw(rest), "adamw"])
    words = ("elementwise=True for param_groups[0] of the NewtonSchulz", "a trial raises ValueError", "atomic=True")
    refused(ValueError, *words, module=module, optimizer=pair_of(module), elementwise=True)
    words = ("atomic gives 'yes' for param_groups[0] of the NewtonSchulz", "True or False")
    refused(TypeError, *words, module=module, optimizer=pair_of(module), atomic=lambda _: "yes")
    on_one = NewtonSchulz(matrices), adamw(rest)
    differs = dist.get_rank() == 1

    def atomic(group):
        if differs and not is_matrix(group):
            raise KeyError("mine")
        return is_matrix(group)

    refused(KeyError if differs else ValueError, "mine", module=module, optimizer=on_one, atomic=atomic)
    words = ("param groups or options",)
    refused(ValueError, *words, module=module, optimizer=pair_of(module), atomic=lambda g: is_matrix(g) or differs)


def cut_in_two(module):
    """As if a tensor group of two ranks had cut the first matrix by rows."""
    weight = module[0][0].weight
    rows, columns = weight.shape
    box = Box((rows * dist.get_rank(), 0), (rows, columns), 0, (columns, 1), (dist.get_rank(),))
    set_sharding(weight, Sharding((2 * rows, columns), (box,)))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_part_of_a_matrix_is_never_stepped_as_if_it_were_the_whole(stage):
    """Also at stage 0, which cuts nothing itself."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = blocks()
    cut_in_two(module)
    words = ("NewtonSchulz would step a part of '0.0.weight'", "200 of 400 elements", "of shape (40, 10)")
    refused(ValueError, *words, module=module, optimizer=pair_of(module), atomic=is_matrix, stage=stage, group=group)
    assert not hasattr(module, "no_sync")
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=group)  # element by element a part is as good as the whole


@pytest.mark.ranks(2)
def test_one_norm_of_all_gradients_is_refused_where_a_rank_has_parts():
    class JointlyScaled(torch.optim.Optimizer):
        def __init__(self, parameters, lr=0.1):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                given = [each for each in group["params"] if each.grad is not None]
                norm = torch.nn.utils.get_total_norm([each.grad for each in given])
                for each in given:
                    each.sub_(each.grad / norm, alpha=group["lr"])

    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = blocks()
    shard(module, JointlyScaled(module.parameters()), stage=0, group=group)
    module = blocks()
    cut_in_two(module)
    words = ("JointlyScaled steps a parameter by what it sees of all", "'0.0.weight'", "tensor ranks")
    given = {"module": module, "optimizer": JointlyScaled(module.parameters()), "stage": 0, "group": group}
    refused(ValueError, *words, **given, atomic=True)
    refused(ValueError, "optimizer=JointlyScaled", "'0.0.weight'", "pass update=dict(elementwise=True)", **given)


@pytest.mark.ranks(4)
def test_few_large_matrices_for_many_ranks_lie_in_one_chunk_with_little_padding():
    """A chunk of one matrix would be as large as four."""
    counts = []
    for make, atomic in ((pair_of, is_matrix), (lambda module: [adamw(module.parameters())], False)):
        module = mlp(width=48, depth=8).double()
        matrices = sum(each.numel() for each in module.parameters() if each.ndim == 2)
        optimizers = both(module, 1, make, bucket=1000, atomic=atomic)
        if make is pair_of:
            owned = sum(each.numel() for each in optimizers[0].param_groups[0]["params"])
        steps(module, optimizers, [[batch(0, width=48)]])
        with count_collectives() as counted:
            steps(module, optimizers, [[batch(1, width=48)]])
        counts.append(sum(each.elements for each in counted.events if each.dtype == torch.float64))
    assert counts[0] < 1.3 * counts[1]
    assert owned == matrices / 4
