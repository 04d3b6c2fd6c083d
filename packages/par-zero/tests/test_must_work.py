"""What training loops do beside the plain step: at every stage it gives what one model on all data gives."""

import copy
import gc
import time
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from par_testing import Strict, count_collectives, for_each
from par_zero import no_sync, reduces_gradients, shard, summon

from .helpers import (
    KINDS_OF_STAGES,
    STAGES,
    adamw,
    assert_near,
    assert_same,
    batch,
    copies,
    deferred,
    for_each_stage,
    joint,
    loss_of,
    mlp,
    sgd,
    sharded,
    train,
    whole,
)


def micro(steps=2, count=3):
    return [[batch(step, width=8, micro=number) for number in range(count)] for step in range(steps)]


def alone(make=adamw, module=None):
    module = module or mlp()
    return module, make(module.parameters())


def step_alone(module, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@for_each_stage
@pytest.mark.ranks(2)
def test_under_no_sync_microbatches_give_what_ddp_and_one_backward_of_the_sum_give(stage):
    module, optimizer = sharded(mlp(), stage)
    train(module, optimizer, micro(), deferred=deferred(module))

    reference, its = alone()
    ddp = DistributedDataParallel(reference)
    train(ddp, its, micro(), deferred=ddp.no_sync)
    assert_same(whole(module), copies(reference))

    joint_model, its = alone()
    for step in range(2):
        losses = [loss_of(joint_model, joint(step, width=8, micro=number)) for number in range(3)]
        step_alone(joint_model, its, sum(losses))
    assert_near(whole(module), copies(joint_model), rtol=1e-4, atol=1e-5)  # sums in another order, through AdamW


@pytest.mark.ranks([1, 4])
def test_under_no_sync_the_stages_are_bit_equal():
    results = []
    for stage in STAGES:
        module, optimizer = sharded(mlp(), stage)
        train(module, optimizer, micro(), deferred=module.no_sync)  # the method is the function
        results.append(whole(module))
    module, optimizer = sharded(mlp(), 3)
    train(module, optimizer, micro(), deferred=partial(module.no_sync, keep=False))
    for result in [*results, whole(module)]:
        assert_same(results[0], result)


@for_each(reduce=("mean", "sum"))
@pytest.mark.ranks(3)
def test_several_backwards_add_up(reduce):
    results = []
    for stage in STAGES:
        module, optimizer = sharded(mlp(), stage, sgd, reduce_op=reduce)
        train(module, optimizer, micro(2))
        results.append(whole(module))
    for result in results[1:]:
        assert_same(results[0], result)

    reference, its = alone(sgd)
    for step in range(2):
        losses = [loss_of(reference, joint(step, width=8, micro=number)) for number in range(3)]
        step_alone(reference, its, sum(losses) * (dist.get_world_size() if reduce == "sum" else 1))
    assert_near(results[0], copies(reference), rtol=1e-4, atol=1e-5)  # sums in another order


@for_each_stage
@pytest.mark.ranks(2)
def test_no_sync_after_a_reduced_backward_adds_up_too(stage):
    module, optimizer = sharded(mlp(), stage, sgd)
    for number, quiet in enumerate((False, True, True, False)):
        with no_sync(module) if quiet else nullcontext():
            loss_of(module, batch(0, width=8, micro=number)).backward()
    optimizer.step()
    reference, its = alone(sgd)
    step_alone(reference, its, sum(loss_of(reference, joint(0, width=8, micro=number)) for number in range(4)))
    assert_near(whole(module), copies(reference))


@pytest.mark.cpu(reason="its prediction is the program of a CPU")
@for_each(stage=KINDS_OF_STAGES, how=("none", "zero", "module", "module zero"))
@pytest.mark.ranks(2)
def test_gradients_are_dropped_in_every_way(stage, how):
    """Reduced ones, and those that wait under no_sync."""
    module, optimizer = sharded(mlp(), stage, sgd)
    for step in range(2):
        for wasted in (False, True):
            with no_sync(module) if wasted else nullcontext():
                loss_of(module, batch(9, width=8)).backward()
            target = module if how.startswith("module") else optimizer
            target.zero_grad(set_to_none="zero" not in how)
        loss_of(module, batch(step, width=8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference, its = alone(sgd)
    for step in range(2):
        step_alone(reference, its, loss_of(reference, joint(step, width=8)))
    assert_near(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_parameters_are_frozen_and_unfrozen_between_steps(stage):
    reference, its = alone()
    module, optimizer = mlp(), None
    for each in (module, reference):
        each[0].requires_grad_(False)
    module, optimizer = sharded(module, stage)
    for step in range(6):
        if step == 2:
            module[0].requires_grad_(True)
            reference[0].requires_grad_(True)
        if step == 4:
            module[2].requires_grad_(False)
            reference[2].requires_grad_(False)
        train(module, optimizer, [[batch(step, width=8)]])
        train(reference, its, [[joint(step, width=8)]])
        if step == 1:
            assert_same({"": whole(module)["0.0.weight"]}, {"": mlp()[0][0].weight.detach()})
        if step == 3:
            before = whole(module)
    after = whole(module)
    assert_same({"": after["2.0.weight"]}, {"": before["2.0.weight"]})
    assert_near(after, copies(reference))


class Branching(nn.Module):
    """Runs the branches that it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, use):
        for number in use:
            x = x + torch.tanh(self.branches[number](x))
        return x


def flat_state(optimizer):
    return [
        value.clone() for state in optimizer.state.values() for value in state.values() if getattr(value, "ndim", 0)
    ]  # moments, not counts


@for_each(stage=KINDS_OF_STAGES, none=(True, False))
@pytest.mark.ranks(2)
def test_what_no_rank_uses_keeps_value_and_moments(stage, none):
    module, optimizer = sharded(Branching(), stage, bucket=10**6)
    both = [(0, 1, 2), (0, 2), (2,), (0, 1)]
    before = {}
    for step, use in enumerate(both):
        optimizer.zero_grad(set_to_none=none)
        module(batch(step, width=8), use).square().mean().backward()
        before = whole(module)
        optimizer.step()
        after = whole(module)
        for name, value in after.items():
            assert torch.equal(value, before[name]) == (int(name.split(".")[1]) not in use), (step, name)
    assert flat_state(optimizer)


@for_each_stage
@pytest.mark.ranks(2)
def test_moments_of_what_is_unused_do_not_decay(stage):
    """With momentum alone counts play no part, so that one model with set_to_none gives the same."""
    module, optimizer = sharded(Branching(), stage, sgd, bucket=10**6)
    reference = Branching()
    its = sgd(reference.parameters())
    for step, use in enumerate([(0, 1, 2), (0, 2), (2,), (0, 1, 2), (1,)]):
        optimizer.zero_grad()
        module(batch(step, width=8), use).square().mean().backward()
        optimizer.step()
        step_alone(reference, its, reference(joint(step, width=8), use).square().mean())
    assert_near(whole(module), copies(reference))


def check_branches(stage):
    module, optimizer = sharded(Branching(), stage, sgd)
    reference = Branching()
    its = sgd(reference.parameters())
    by_rank = [[(0, 1, 2), (0, 2)], [(2,), (0, 1)], [(0,), (0,)], [(0, 1), (1, 2)]]
    if stage == 3:  # in the first step all must gather alike
        by_rank = [[(0, 1, 2), (0, 1, 2)], *by_rank]
    for step, uses in enumerate(by_rank):
        optimizer.zero_grad()
        module(batch(step, width=8), uses[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        losses = [reference(batch(step, rank, width=8), use).square().mean() for rank, use in enumerate(uses)]
        step_alone(reference, its, sum(losses) / 2)
    assert_near(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_branch_may_run_on_one_rank_only(stage):
    check_branches(stage)


@pytest.mark.ranks(2, backend="strict", strict=Strict(slots=1))
def test_a_branch_may_run_on_one_rank_only_where_one_communicator_goes_on_at_a_time():
    check_branches(3)


@for_each(stage=(0, 2, 3))  # gradients are reduced at stage 1 as at stage 2
@pytest.mark.ranks(4)
def test_what_only_the_first_of_many_microbatches_uses_is_trained(stage):
    """A count of its users that doubles with each sum over ranks would overflow to none."""
    module, optimizer = sharded(Branching(), stage, sgd)
    before = whole(module)
    for number in range(18):
        module(batch(0, width=8), (0, 1) if number == 0 else (0,)).square().mean().backward()
    optimizer.step()
    after = whole(module)
    assert not torch.equal(before["branches.1.weight"], after["branches.1.weight"])
    assert torch.equal(before["branches.2.weight"], after["branches.2.weight"])


@for_each_stage
@pytest.mark.ranks(2)
def test_two_forwards_before_one_backward(stage):
    module, optimizer = sharded(mlp(), stage)
    reference, its = alone()
    ddp = DistributedDataParallel(reference)
    for step in range(2):
        for model, each in ((module, optimizer), (ddp, its)):
            one, other = loss_of(model, batch(step, width=8)), loss_of(model, batch(step, width=8, micro=1))
            step_alone(model, each, one * other)
    # Autograd may add the two in either order.
    assert_near(whole(module), copies(reference), rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    """An input layer, blocks that are computed twice, and an output layer."""

    def __init__(self, reentrant=None, *, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.last = nn.Linear(8, 8)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x):
        x = self.first(self.first(x))
        for block in [*self.blocks, *self.blocks] if self.shared else self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@for_each(stage=KINDS_OF_STAGES, reentrant=(True, False))
@pytest.mark.ranks(2)
def test_activation_checkpointing_changes_nothing(stage, reentrant):
    module, optimizer = sharded(Checkpointed(reentrant), stage)
    reference = Checkpointed()
    its = adamw(reference.parameters())
    data = [[batch(step, width=8)] for step in range(2)]
    train(module, optimizer, data)
    train(DistributedDataParallel(reference), its, data)
    assert_same(whole(module), copies(reference))


@for_each(stage=(0, 1, 2))
@pytest.mark.ranks(2)
def test_passes_within_a_pass_reduce_nothing_by_themselves(stage):
    """Reentrant checkpoints run a backward pass for each block."""
    received = []
    for reentrant in (None, True):
        module, _ = sharded(Checkpointed(reentrant), stage)
        with count_collectives() as counted:
            loss_of(module, batch(0, width=8)).backward()
        received.append(counted.received())
    assert received[0] == received[1] > 0


@for_each_stage
@pytest.mark.ranks(2)
def test_a_layer_that_is_checkpointed_twice_gets_both_gradients(stage):
    for reentrant in (False, True):
        module, optimizer = sharded(Checkpointed(reentrant, shared=True), stage, sgd, bucket=10**6, units=[])
        reference = Checkpointed(shared=True)
        its = sgd(reference.parameters())
        for step in range(2):
            train(module, optimizer, [[batch(step, width=8)]])
            train(reference, its, [[joint(step, width=8)]])
        assert_near(whole(module), copies(reference), rtol=1e-4, atol=1e-5)  # many sums in another order


@for_each_stage
@pytest.mark.ranks(2)
def test_a_submodule_is_called_directly(stage):
    module, optimizer = sharded(mlp(), stage, sgd)
    reference, its = alone(sgd)
    for step in range(2):
        optimizer.zero_grad()
        inner = module[1](batch(step, width=8)).square().mean()
        inner = inner + module[0][2](module[0][1](module[0][0](batch(step, width=8)))).square().mean()
        inner.backward()
        optimizer.step()
        data = joint(step, width=8)
        step_alone(reference, its, reference[1](data).square().mean() + reference[0](data).square().mean())
    assert_near(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_copy_from_before_is_independent(stage):
    original = mlp()
    copied = copy.deepcopy(original)
    module, optimizer = sharded(copied, stage)
    train(module, optimizer, micro())
    assert_same(copies(original), copies(mlp()))


@for_each_stage
@pytest.mark.ranks(2)
def test_several_models_and_optimizers_train_side_by_side(stage):
    one, its = sharded(mlp(seed=1), stage)
    other, others = sharded(mlp(seed=2), (stage + 1) % 4)
    references = [alone(module=mlp(seed=seed)) for seed in (1, 2)]
    ddps = [DistributedDataParallel(module) for module, _ in references]
    for step in range(2):
        data = batch(step, width=8)
        for first, second, optimizers in ((one, other, (its, others)), (*ddps, [each for _, each in references])):
            loss_of(nn.Sequential(first, second), data).backward()  # one backward through both
            for each in optimizers:
                each.step()
                each.zero_grad()
    assert_same(whole(one), copies(references[0][0]))
    assert_same(whole(other), copies(references[1][0]))


@for_each(stages=((3, 0), (1, 3), (2, 2)))
@pytest.mark.ranks(4)
def test_parts_of_a_module_have_stages_groups_and_dtypes_of_their_own(stages):
    """One is shared by all ranks, one by each pair of them, whose weights differ; the whole is not sharded."""
    pair = dist.get_rank() // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    first, second = mlp(seed=1), mlp(seed=2 + pair)
    optimizers = [adamw(first.parameters()), adamw(second.parameters())]
    shard(first, optimizers[0], stage=stages[0], group=dist.group.WORLD, overlap={"bucket": 300})
    shard(
        second,
        optimizers[1],
        stage=stages[1],
        group=pairs[pair],
        overlap={"bucket": 300},
        precision={"reduce_dtype": torch.float64},
    )
    references = [mlp(seed=seed) for seed in (1, 2, 3)]
    its = [adamw(reference.parameters()) for reference in references]
    for step in range(2):
        loss_of(nn.Sequential(first, second), batch(step, width=8)).backward()
        for rank in range(4):
            reference = nn.Sequential(references[0], references[1 + rank // 2])
            (loss_of(reference, batch(step, rank, width=8)) / 4).backward()
        for parameter in (*references[1].parameters(), *references[2].parameters()):
            parameter.grad *= 2  # they have seen two ranks
        for each in (*optimizers, *its):
            each.step()
            each.zero_grad()
    assert_near(whole(first), copies(references[0]))
    assert_near(whole(second), copies(references[1 + pair]))


@for_each_stage
@pytest.mark.ranks(2)
def test_evaluation_between_steps_changes_nothing(stage):
    module, optimizer = sharded(mlp(), stage)
    reference, its = alone()
    ddp = DistributedDataParallel(reference)
    for step in range(4):
        train(module, optimizer, [[batch(step, width=8)]])
        train(ddp, its, [[batch(step, width=8)]])
        if step == 1:
            module.eval()
        with torch.no_grad():
            assert torch.equal(module(batch(7, width=8)), reference(batch(7, width=8)))
        assert torch.equal(module[1](batch(7, width=8)), reference[1](batch(7, width=8)))  # nor with a graph
        module.train()
    assert_same(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_scheduler_made_before_goes_on(stage):
    module, reference = mlp(), mlp()
    optimizer, its = adamw(module.parameters()), adamw(reference.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (optimizer, its)]
    (group,) = optimizer.param_groups
    shard(module, optimizer, stage=stage, group=dist.group.WORLD)
    ddp = DistributedDataParallel(reference)
    for step in range(3):
        train(module, optimizer, [[batch(step, width=8)]])
        train(ddp, its, [[batch(step, width=8)]])
        for scheduler in schedulers:
            scheduler.step()
    assert optimizer.param_groups[0] is group
    assert group["initial_lr"] == 1e-2
    assert group["lr"] == 1e-2 / 8
    assert_same(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_step_with_a_closure_equals_one_process(stage):
    module, optimizer = sharded(mlp(), stage)
    reference, its = alone()
    train(DistributedDataParallel(reference), its, [[batch(step, width=8)] for step in range(2)])
    for step in range(2):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(module, batch(step, width=8))
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if step else optimizer.step(closure)
        assert loss.item() > 0
    assert_same(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_the_gradient_of_inputs_alone_is_there(stage):
    module, _ = sharded(mlp(), stage)
    module.requires_grad_(False)
    data = batch(0, width=8).requires_grad_(True)
    loss_of(module, data).backward()
    other = batch(0, width=8).requires_grad_(True)
    loss_of(mlp(), other).backward()
    assert torch.equal(data.grad, other.grad)


@for_each(stage=(2, 3))  # which differ in what happens around forward; 0 and 1 do not
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at what it is given
def test_torch_compile_gives_the_same(stage):
    module, optimizer = sharded(mlp(depth=2), stage)
    reference, its = alone(module=mlp(depth=2))
    ddp = DistributedDataParallel(reference)
    torch.compiler.reset()  # what was compiled for other stages counts against a limit
    compiled = torch.compile(module, backend="aot_eager")
    for step in range(2):
        train(compiled, optimizer, [[batch(step, width=8)]])
        train(ddp, its, [[batch(step, width=8)]])
    assert_near(whole(module), copies(reference), rtol=1e-4, atol=1e-5)  # compiled graphs may fuse and reorder


@for_each_stage
@pytest.mark.ranks(2)
def test_what_is_written_inside_summon_stays(stage):
    for dtype in (None, torch.bfloat16):
        module, optimizer = sharded(mlp(), stage, param_dtype=dtype)
        with summon(module):
            for parameter in module.parameters():
                parameter.detach().fill_(0.25)
        assert all(bool((each == 0.25).all()) for each in whole(module).values())
        data = batch(0, width=8) if dtype is None else batch(0, width=8).bfloat16()
        train(module, optimizer, [[data]])
        for each in whole(module).values():  # AdamW's first step is lr at most, and decay
            torch.testing.assert_close(each.float(), torch.full_like(each.float(), 0.25), rtol=0, atol=0.012)


@for_each_stage
@pytest.mark.ranks(2)
def test_what_load_state_dict_writes_stays(stage):
    """At stage 3 within summon; copies of more digits follow."""
    for dtype in (None, torch.bfloat16):
        module, optimizer = sharded(mlp(), stage, sgd, param_dtype=dtype)
        train(module, optimizer, [[batch(0, width=8).to(dtype)]])
        optimizer.param_groups[0]["lr"] = 0.0
        with summon(module) if stage == 3 else nullcontext():
            module.load_state_dict(mlp(seed=1).state_dict())
        train(module, optimizer, [[batch(0, width=8).to(dtype)]])
        expected = mlp(seed=1) if dtype is None else mlp(seed=1).to(dtype)
        assert_same(whole(module), copies(expected))


class Scaled(nn.Module):
    """Returns a parameter of its own beside what it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.linear(x), self.scale


@for_each_stage
@pytest.mark.ranks(2)
def test_a_parameter_that_a_module_returns_gathers_no_hooks(stage):
    module, optimizer = sharded(Scaled(), stage, sgd)
    reference = Scaled()
    its = sgd(reference.parameters())
    for step in range(2):
        output, scale = module(batch(step, width=8))
        step_alone(module, optimizer, (output * scale).square().mean())
        output, scale = reference(joint(step, width=8))
        step_alone(reference, its, (output * scale).square().mean())
        assert not module.scale._backward_hooks
    assert_near(whole(module), copies(reference))


class Complex(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.turn = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x).to(torch.complex64) @ self.turn).abs()


@pytest.mark.cpu(reason="its prediction is the program of a CPU")
@for_each_stage
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:Casting complex")
def test_gradients_of_complex_parameters_are_added_up_whole(stage):
    module, optimizer = sharded(Complex(), stage, sgd, reduce_dtype=torch.float64)
    reference, its = alone(sgd, Complex())
    for step in range(2):
        step_alone(module, optimizer, loss_of(module, batch(step, width=8)))
        step_alone(reference, its, loss_of(reference, joint(step, width=8)))
    assert_near(whole(module), copies(reference))


@for_each_stage
@pytest.mark.ranks(2)
def test_a_parameter_under_a_new_name_is_trained_on(stage):
    """A parametrization keeps the very parameter."""
    module, optimizer = sharded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage)
    with summon(module):
        nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Identity(), unsafe=True)
    before = whole(module)
    for step in range(2):
        train(module, optimizer, [[batch(step, width=8)]])
    after = whole(module)
    name = "0.parametrizations.weight.original"
    assert not torch.equal(before[name], after[name])


@for_each_stage
@pytest.mark.ranks(2)
def test_what_nobody_holds_any_more_is_freed(stage):
    module, optimizer = sharded(mlp(), stage)
    train(module, optimizer, [[batch(0, width=8)]])
    seen = [weakref.ref(each) for each in (module, optimizer, next(module.parameters()))]
    del module, optimizer
    for _ in range(50):  # backward of a device runs in a thread, which holds the model for a moment after it
        gc.collect()
        if not any(each() for each in seen):
            break
        time.sleep(0.02)
    assert [each() for each in seen] == [None, None, None]


@for_each(stage=KINDS_OF_STAGES, quiet=(False, True))
@pytest.mark.ranks(2)
def test_a_gradient_of_a_gradient(stage, quiet):
    """Its pass needs the parameters that the one before gave back, were it not for its graph or for no_sync."""

    def penalised(model, x):
        loss = loss_of(model, x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    module, optimizer = sharded(mlp(), stage, sgd)
    reference, its = alone(sgd)
    for step in range(2):
        with no_sync(module) if quiet else nullcontext():
            loss = penalised(module, batch(step, width=8).requires_grad_())
            module[0](batch(step, width=8)).sum()  # nor does another forward give them back
        step_alone(module, optimizer, loss)
        both = [penalised(reference, batch(step, rank, width=8).requires_grad_()) for rank in range(2)]
        step_alone(reference, its, sum(both) / 2)
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(2)
@for_each_stage
def test_no_sync_that_is_entered_twice_ends_with_the_last_in_any_order(stage):
    """As two pipeline stages do that share a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, optimizer, stage=stage, group=dist.group.WORLD)
    first, second = no_sync(model), no_sync(model)
    assert reduces_gradients(model)
    assert not reduces_gradients(nn.Linear(5, 7))  # it is not sharded
    first.__enter__()
    second.__enter__()
    x = torch.randn(4, 5)
    with count_collectives() as counted:
        for each in (first, second):
            assert not reduces_gradients(model)
            model(x).sum().backward()
            each.__exit__(None, None, None)
    reductions = ("all_reduce", "all_to_all", "reduce_scatter")
    assert not [event for event in counted.events if event.op in reductions and event.dtype == torch.float32]
    assert reduces_gradients(model)
    with count_collectives() as counted:
        model(x).sum().backward()
    assert [event for event in counted.events if event.op in reductions and event.dtype == torch.float32]
