"""Stage 3 where data decides which units run: gathered in one order on all ranks, or a named error on all of them."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Strict, count_collectives, for_each, storm
from par_zero import no_sync, reset

from .helpers import assert_near, assert_same, batch, copies, joint, loss_of, mlp, sgd, sharded, train, whole

ALL = (0, 1, 2, 3)


class Branching(nn.Module):
    """Runs the branches that it is told to, in that order. The linears of a branch are of one unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in ALL)

        def forward(branch, x, *, half):
            return torch.tanh(branch[0](x) if half else branch[1](branch[0](x)))

        for number, branch in enumerate(self.branches):
            branch.forward = lambda x, half=False, branch=branch: forward(branch, x, half=half)
            assert number in ALL

    def forward(self, x, use, half=()):
        for number in use:
            x = x + self.branches[number](x, half=number in half)
        return x


def branching(**options):
    def units(module):
        return type(module) is nn.ModuleList and len(module) == 2

    return sharded(Branching(), 3, sgd, units=units, **options)


def backward(module, step, use, half=()):
    module(batch(step, width=8), use, half).square().mean().backward()


def run(module, optimizer, step, use, half=()):
    """A step with the branches of this rank."""
    optimizer.zero_grad()
    backward(module, step, use, half)
    optimizer.step()


def check_against_one_device(module, steps):
    """That parameters are those of one device after steps in which each rank used some branches, and halves of some."""
    reference = Branching()
    its = sgd(reference.parameters())
    for step, of_rank in enumerate(steps):
        its.zero_grad()
        losses = [
            reference(batch(step, rank, width=8), use, half).square().mean() for rank, (use, half) in enumerate(of_rank)
        ]
        (sum(losses) / len(losses)).backward()
        its.step()
    assert_near(whole(module), copies(reference))


def comparisons(counted):
    return [event for event in counted.events if event.dtype == torch.int32]


DIFFERENT = {
    "another": ((0, 1, 3), (0, 2, 3)),
    "skipped": ((0, 1, 2), (0, 2)),
    "swapped": ((0, 1, 2), (0, 2, 1)),
    "less": ((0, 1, 2), (0, 1)),
    "one": (ALL, (3,)),
}


@for_each(how=DIFFERENT, inflight=(None, storm(1)))
@pytest.mark.ranks(2)
def test_ranks_may_run_different_units_in_the_first_pass(how, inflight):
    uses = DIFFERENT[how]
    module, optimizer = branching(inflight=inflight)
    later = [(ALL, (0,)), ((1, 2), ALL)] if {*uses[0], *uses[1]} == {*ALL} else [(uses[1], uses[0]), uses]
    steps = [uses, uses, *later]
    for step, each in enumerate(steps):
        run(module, optimizer, step, each[dist.get_rank()])
    check_against_one_device(module, [[(use, ()) for use in each] for each in steps])


@pytest.mark.ranks(3, backend="strict", strict=Strict(slots=1))
def test_three_ranks_may_run_different_units_in_the_first_pass():
    module, optimizer = branching()
    steps = [((0, 1), (1, 2), (3,)), ((0, 1), (1, 2), (3,)), (ALL, (1,), (0, 2))]
    for step, uses in enumerate(steps):
        run(module, optimizer, step, uses[dist.get_rank()])
    check_against_one_device(module, [[(use, ()) for use in uses] for uses in steps])


@pytest.mark.ranks(2)
def test_units_of_one_rank_in_the_first_pass_are_gathered_ahead_in_the_next():
    module, optimizer = branching()
    uses = (ALL, (0, 2))
    run(module, optimizer, 0, uses[dist.get_rank()])
    with count_collectives() as counted:
        run(module, optimizer, 1, uses[dist.get_rank()])
    assert len(comparisons(counted)) == 1  # at the end of the pass


@pytest.mark.ranks(2)
def test_evaluation_and_no_sync_begin_with_different_units():
    module, optimizer = branching()
    rank = dist.get_rank()
    with torch.no_grad():
        module(batch(0, width=8), ((0, 3), (1,))[rank])
    steps = [[((1, 2), ()), ((2,), ())], [(ALL, ()), ((0,), ())]]
    optimizer.zero_grad()
    with no_sync(module):
        backward(module, 0, steps[0][rank][0])
    backward(module, 1, steps[1][rank][0])
    optimizer.step()
    reference = Branching()
    its = sgd(reference.parameters())
    for step, uses in enumerate(steps):
        losses = [reference(batch(step, each, width=8), use).square().mean() for each, (use, _) in enumerate(uses)]
        (sum(losses) / len(losses)).backward()
    its.step()
    assert_near(whole(module), copies(reference))


def check_skipping():
    module, optimizer = branching()
    steps = [[ALL, ALL], [(0, 1), (2, 3)], [(3,), ALL], [(1, 2), (0, 3)], [(0,), (0,)], [(0, 2), (1, 3)]]
    for step, uses in enumerate(steps):
        run(module, optimizer, step, uses[dist.get_rank()])
    check_against_one_device(module, [[(use, ()) for use in uses] for uses in steps])


@pytest.mark.ranks(2)
def test_later_each_rank_may_skip_other_units():
    check_skipping()


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_a_rank_that_skips_units_begins_reductions_between_the_same_gatherings():
    """One communicator goes on at a time, so that any other order would stop the ranks for good."""
    check_skipping()


class Ahead(nn.Module):
    """Reads the weight of its last block before its first one, if it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, ahead=False):
        x = nn.functional.linear(x, self.blocks[2].weight) if ahead else x
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@for_each(inflight=(None, 1), ahead=((True, True), (True, False), (False, True)))
@pytest.mark.ranks(2)
def test_gradient_after_its_unit_was_left_behind_counts(inflight, ahead):
    """The weight is read outside of its module on one rank or on both, so its gradient is complete late."""
    module, optimizer = sharded(Ahead(), 3, sgd, bucket=100, inflight=inflight)
    reference = Ahead()
    its = sgd(reference.parameters())
    for step in range(3):
        if step != 1:  # in the second step the program has another order
            with no_sync(module):  # so that the weight is there before its module is called
                module(batch(7, width=8)).sum().backward()
            optimizer.zero_grad()
        here = ahead[dist.get_rank()] and step > 0
        with no_sync(module):
            module(batch(8, width=8)).sum().backward()
        optimizer.zero_grad()
        module(batch(step, width=8), ahead=here).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        its.zero_grad()
        losses = [reference(batch(step, rank, width=8), ahead=ahead[rank] and step > 0) for rank in range(2)]
        sum(loss.square().mean() / 2 for loss in losses).backward()
        its.step()
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(4)
def test_each_of_four_ranks_may_leave_parameters_of_a_unit_unused():
    """Its gradients are complete in time on some ranks alone, and what they begin crosses what others gather."""
    module, optimizer = branching()
    halves = [(), (3,), (2, 1), (0, 1, 2, 3)]
    steps = [[(ALL, halves[(rank + step) % 4]) for rank in range(4)] for step in range(4)]
    for step, of_rank in enumerate(steps):
        run(module, optimizer, step, *of_rank[dist.get_rank()])
    check_against_one_device(module, steps)


@for_each(late=((0, 1, 2, 3), (1, 0, 2), (0, 2, 1), (3,)))
@pytest.mark.ranks(2)
def test_a_unit_that_one_rank_needs_later_is_named_on_all_ranks(late):
    module, optimizer = branching()
    for step in range(2):
        run(module, optimizer, step, (0, 1, 2))
    needs_more = dist.get_rank() == 1
    with pytest.raises(RuntimeError, match=r"rank 1 runs 'branches\.\d' where rank 0 ends backward, .*; make one unit"):
        backward(module, 2, late if needs_more else (0, 1, 2))
    reset(module)
    run(module, optimizer, 2, (0, 1, 2))
    check_against_one_device(module, [[((0, 1, 2), ())] * 2] * 3)


@pytest.mark.ranks(2)
def test_what_all_ranks_need_later_is_learned():
    module, optimizer = branching()
    orders = [(0, 1), (0, 1), (3, 2, 1), (3, 2, 1), (3, 2, 1), (0,), ALL, (3, 2, 1)]
    compared = []
    for step, use in enumerate(orders):
        with count_collectives() as counted:
            run(module, optimizer, step, use)
        compared.append(len([event for event in comparisons(counted) if event.elements == 4]))
    check_against_one_device(module, [[(use, ())] * 2 for use in orders])
    assert compared[0] > 1
    assert compared[1] == 1
    assert compared[4] == 1


@for_each(late=((0, 1, 2, 3), (1, 0, 2), (3,)), inflight=(1, 2))
@pytest.mark.ranks(2)
def test_unit_needed_later_under_inflight_is_named(late, inflight):
    """The other rank waits in backward for reductions that the rank which departs would never begin by itself."""
    module, optimizer = branching(inflight=inflight)
    for step in range(3):
        run(module, optimizer, step, (0, 1, 2))
    needs_more = dist.get_rank() == 0
    with pytest.raises(RuntimeError, match=r"rank 1 ends backward where rank 0 runs 'branches\.\d', .*; make one unit"):
        backward(module, 3, late if needs_more else (0, 1, 2))
    reset(module)
    run(module, optimizer, 3, (0, 1, 2))
    check_against_one_device(module, [[((0, 1, 2), ())] * 2] * 4)


@pytest.mark.ranks(2)
def test_unit_needed_later_under_no_sync_and_inflight_is_learned():
    module, optimizer = branching(inflight=1)
    reference = Branching()
    its = sgd(reference.parameters())
    for step, use in enumerate([(0, 1), (0, 1), ALL, ALL, (0, 1)]):
        optimizer.zero_grad()
        its.zero_grad()
        for micro in range(2):
            with no_sync(module) if micro == 0 else nullcontext():
                backward(module, 10 * step + micro, use)
            for rank in range(2):
                data = batch(10 * step + micro, rank, width=8)
                (reference(data, use).square().mean() / 2).backward()
        optimizer.step()
        its.step()
    assert_near(whole(module), copies(reference))


@for_each(inflight=(1, 2))
@pytest.mark.ranks(2)
def test_units_all_ranks_need_later_under_inflight_are_learned(inflight):
    module, optimizer = branching(inflight=inflight)
    orders = [(0, 1), (0, 1), (3, 2, 1), (3, 2, 1), (0,), ALL, (3, 2, 1)]
    for step, use in enumerate(orders):
        run(module, optimizer, step, use)
    check_against_one_device(module, [[(use, ())] * 2 for use in orders])


@pytest.mark.ranks(2, backend="strict")
def test_rank_that_departs_under_inflight_keeps_collectives_in_order():
    module, optimizer = branching(inflight=1)
    for step in range(3):
        run(module, optimizer, step, (0, 1, 2))
    with pytest.raises(RuntimeError, match="make one unit"):
        backward(module, 3, ALL if dist.get_rank() == 0 else (0, 1, 2))
    reset(module)
    orders = [(0, 1, 2), ALL]
    for step, use in enumerate(orders, start=3):
        run(module, optimizer, step, use)
    check_against_one_device(module, [[(use, ())] * 2 for use in [(0, 1, 2)] * 4 + [ALL]])


class Recalling(Branching):
    """Runs its last branch within backward, between the second and the first one, if it is told to."""

    def forward(self, x, use, half=(), recalls=False):
        for number in use:
            x = x + self.branches[number](x, half=number in half)
            if number == 0 and recalls:
                here = x.detach()
                x.register_hook(lambda gradient, here=here: gradient + 0 * self.branches[3](here))
        return x


def recalling(inflight):
    def units(module):
        return type(module) is nn.ModuleList and len(module) == 2

    return sharded(Recalling(), 3, sgd, units=units, bucket=1, inflight=inflight)


def recall(module, optimizer, step, *, half=(), recalls=False):
    optimizer.zero_grad()
    module(batch(step, width=8), (0, 1, 2), half, recalls=recalls).square().mean().backward()
    optimizer.step()


@for_each(inflight=(None, 1, 2))
@pytest.mark.ranks(2)
def test_unit_all_ranks_need_later_in_backward_is_learned(inflight):
    module, optimizer = recalling(inflight)
    for step in range(6):
        recall(module, optimizer, step, recalls=step > 1)
    check_against_one_device(module, [[((0, 1, 2), ())] * 2] * 6)


@pytest.mark.ranks(2)
def test_unit_needed_in_backward_amid_other_reductions_is_named():
    module, optimizer = recalling(1)
    for step in range(2):
        recall(module, optimizer, step)
    half = (1,) if dist.get_rank() == 1 else ()
    with pytest.raises(
        RuntimeError, match=r"backward comes to 'branches\.3'.*different numbers of reductions; pass Overlap\(inflight"
    ):
        recall(module, optimizer, 2, half=half, recalls=True)
    reset(module)
    recall(module, optimizer, 2)
    check_against_one_device(module, [[((0, 1, 2), ())] * 2] * 3)


class Headed(nn.Module):
    """Blocks that are units, and a head of the root that this rank may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x, head):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) if head else x


@for_each(stage=(0, 1, 3), inflight=(1, None), without=(0, 1))
@pytest.mark.ranks(2)
def test_head_unused_on_one_rank_holds_nothing_back(stage, inflight, without):
    """Its gradients come first on the other rank, whose next reductions wait for that of the head."""
    module, optimizer = sharded(Headed(), stage, sgd, bucket=1, inflight=inflight)
    reference = Headed()
    its = sgd(reference.parameters())
    for step in range(6):
        heads = [step < 3 or rank != without for rank in range(2)]
        optimizer.zero_grad()
        module(batch(step, width=8), heads[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        its.zero_grad()
        losses = [reference(batch(step, rank, width=8), heads[rank]).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        its.step()
    assert_near(whole(module), copies(reference))


class Routed(nn.Module):
    """Experts between an input and a head of the root; a rank runs some of the experts, and perhaps not the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in ALL)

    def forward(self, x, use, head):
        x = self.first(x)
        for number in use:
            x = x + self.experts[number](x)
        return self.head(x) if head else x


@for_each(stage=(1, 3), inflight=(1, 2, None))
@pytest.mark.ranks(2)
def test_experts_that_data_draws_on_each_rank_stop_no_rank(stage, inflight):
    module, optimizer = sharded(Routed(), stage, sgd, bucket=1, inflight=inflight)
    reference = Routed()
    its = sgd(reference.parameters())
    generator = torch.Generator().manual_seed(3)
    for step in range(12):
        drawn = (torch.rand(2, len(ALL) + 1, generator=generator) < 0.5).tolist()
        used = [([n for n in ALL if step == 0 or row[n]], step == 0 or row[-1]) for row in drawn]
        optimizer.zero_grad()
        module(batch(step, width=8), *used[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        its.zero_grad()
        losses = [reference(batch(step, rank, width=8), *used[rank]).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        its.step()
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(2)
def test_evaluation_has_an_order_of_its_own_and_names_what_differs():
    module, optimizer = branching()
    reference = Branching()
    for step in range(3):
        run(module, optimizer, step, ALL)
        reference.load_state_dict(whole(module))
        use = (0, 1, 2) if step == 0 or dist.get_rank() == 0 else (0, 2)
        with torch.no_grad(), count_collectives() as counted:
            assert torch.equal(module(batch(step, width=8), use), reference(batch(step, width=8), use))
        assert len(comparisons(counted)) == (1 if step else 4)  # each unit's, and the end's: the root has none
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"rank 1 runs 'branches\.3' where rank 0 ends a forward"):
        module(batch(0, width=8), ALL if dist.get_rank() == 1 else (0, 1, 2))


@pytest.mark.ranks(2)
def test_a_pass_for_inputs_alone_has_an_order_of_its_own():
    module, _ = branching()
    module.requires_grad_(False)
    for step in range(3):
        data = batch(step, width=8).requires_grad_()
        with count_collectives() as counted:
            module(data, ALL).square().mean().backward()
        assert (len(comparisons(counted)) == 1) == (step > 0)


@pytest.mark.ranks(2)
def test_under_no_sync_units_are_gathered_ahead_in_every_step():
    module, optimizer = sharded(mlp(), 3, sgd)
    other, its = sharded(mlp(), 2, sgd)
    ahead = []
    module[0][0].register_forward_hook(lambda *_: ahead.append(len(counted.events) - len(comparisons(counted))))
    for step in range(3):
        for model, each in ((module, optimizer), (other, its)):
            each.zero_grad()
            with count_collectives() as counted:
                for micro in range(3):
                    with no_sync(model):
                        loss_of(model, batch(step, width=8, micro=micro)).backward()
                loss_of(model, batch(step, width=8, micro=3)).backward()
            each.step()
            if model is module and step:
                assert len(comparisons(counted)) == 1
    assert_same(whole(module), whole(other))
    first, *later = ahead[::4]
    assert later == [2 * first] * 2  # the first unit's, and the next one's


@pytest.mark.ranks(2)
def test_a_forward_without_backward_changes_the_order_for_its_pass_alone():
    module, optimizer = sharded(mlp(), 3, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    for step in range(5):
        if step == 3:
            for _ in range(3):
                loss_of(module, batch(9, width=8))
        with count_collectives() as counted:
            train(module, optimizer, [[batch(step, width=8)]])
        train(reference, its, [[joint(step, width=8)]])
        if step == 4:
            assert len(comparisons(counted)) == 1
    assert_near(whole(module), copies(reference))


@for_each(extra=(-1, 1), evaluates=(False, True))
@pytest.mark.ranks(2)
def test_number_of_steps_that_differs_raises_on_all_ranks(extra, evaluates):
    module, optimizer = sharded(mlp(), 3)
    weights = whole(module)

    def advance(steps=1):
        loss_of(module, batch(dist.get_rank(), width=8)).backward()
        for _ in range(steps):
            optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate():
        loss_of(module, batch(0, width=8))

    advance()
    advance(steps=1 + extra * dist.get_rank())
    with pytest.raises(
        RuntimeError,
        match=rf"rank 1 has taken {1 + extra} steps of its optimizers since the last pass where rank 0 has taken 1",
    ):
        evaluate() if evaluates else advance()
    reset(module)
    module.load_state_dict(weights)
    advance()  # a later pass has nothing left to name
    advance()
