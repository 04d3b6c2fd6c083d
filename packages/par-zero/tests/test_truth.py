"""Who owns a gradient, and a weight: what a program writes by itself counts as on one device, or is an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import gradients
from par_testing import for_each
from par_zero import no_sync, reset, summon

from .helpers import KINDS_OF_STAGES, adamw, assert_near, batch, copies, joint, loss_of, mlp, sgd, sharded, whole

STAGES = (0, 1, 2, 3)


def pair(stage, make=sgd, **options):
    module, optimizer = sharded(mlp(), stage, make, **options)
    reference = mlp()
    return (module, optimizer, batch), (reference, make(reference.parameters()), joint)


def both(stage, program, make=sgd):
    """Runs a program of a module, its optimizer and its data sharded and on one device, and compares weights."""
    for each in (ours, its) if (ours := (pairs := pair(stage, make))[0]) and (its := pairs[1]) else ():
        program(*each)
    assert_near(whole(ours[0]), copies(its[0]))


@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_gradients_set_to_none_in_the_module_are_dropped(stage):
    def program(module, optimizer, data):
        for step in range(3):
            for parameter in module.parameters():
                parameter.grad = None
            loss_of(module, data(step, width=8)).backward()
            optimizer.step()

    both(stage, program)


@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_some_gradients_set_to_none_are_dropped_alone(stage):
    def program(module, optimizer, data):
        for step in range(4):
            loss_of(module, data(step, width=8)).backward()
            module[step % 3][0].weight.grad = None  # before a step, which passes it by
            optimizer.step()
            module[1][2].bias.grad = None  # before a pass, which begins it anew

    both(stage, program, adamw)


@pytest.mark.cpu(reason="sparse tensors")
@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_gradients_stay_until_they_are_dropped(stage):
    def program(module, optimizer, data):
        loss_of(module, data(0, width=8)).backward()
        optimizer.step()
        optimizer.step()
        loss_of(module[:2], data(1, width=8)).backward() if stage < 3 else loss_of(module, data(1, width=8)).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
        loss_of(module, data(2, width=8)).backward()
        optimizer.step()

    both(stage, program, adamw)


@pytest.mark.cpu(reason="sparse tensors")
@for_each(stage=(0, 2))
@pytest.mark.ranks(2)
def test_a_part_called_by_itself_adds_to_what_stays(stage):
    """Its backward is not seen before the first gradient arrives."""

    def program(module, optimizer, data):
        for step in range(3):
            loss_of(module[1], data(step, width=8)).backward()
            optimizer.step()
            if step == 1:
                for parameter in module.parameters():
                    parameter.grad = None

    both(stage, program)


@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_a_gradient_by_hand_raises_before_the_step(stage):
    module, optimizer = sharded(mlp(), stage, sgd)
    loss_of(module, batch(0, width=8)).backward()
    before = whole(module)
    weight = module[0][0].weight
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"'0.0.weight' was given a gradient by hand"):
            weight.grad = torch.ones(16, 8)
        return
    weight.grad = torch.ones(16, 8)
    with pytest.raises(RuntimeError, match=r"'0.0.weight' was given a gradient by hand.*torch.autograd.backward"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in whole(module).items())


@for_each(stage=(0, 1, 2))
@pytest.mark.ranks(2)
def test_gradients_given_to_autograd_are_summed_and_stepped(stage):
    def program(module, optimizer, data):
        for step in range(2):
            parameters = list(module.parameters())
            given = torch.autograd.grad(loss_of(module, data(step, width=8)), parameters)
            torch.autograd.backward(parameters, [gradient / 2 for gradient in given])
            optimizer.step()
            optimizer.zero_grad()

    both(stage, program)


READERS = {
    "a norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "a product": lambda module: module[0][0].weight.grad.mul_(0.5),
    "a copy": lambda module: [parameter.grad.clone() for parameter in module.parameters()],
    "zeros": lambda module: module[1].zero_grad(set_to_none=False),
}


@for_each(stage=KINDS_OF_STAGES, reader=tuple(READERS))
@pytest.mark.ranks(2)
def test_a_read_of_a_gradient_in_the_module_raises_by_name(stage, reader):
    module, optimizer = sharded(mlp(), stage, sgd)
    loss_of(module, batch(0, width=8)).backward()
    with pytest.raises(RuntimeError, match=r"the gradient of '\d.\d.\w+' .* par_groups.gradients\(optimizer\)"):
        READERS[reader](module)
    assert list(gradients(optimizer))
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())


@for_each(stage=KINDS_OF_STAGES)
@pytest.mark.ranks(2)
def test_a_step_of_gradients_that_wait_for_their_sum_raises(stage):
    module, optimizer = sharded(mlp(), stage, sgd)
    with no_sync(module):
        loss_of(module, batch(0, width=8)).backward()
    with pytest.raises(RuntimeError, match=r"leave no_sync\(\) before the last backward"):
        optimizer.step()
    reset(module)
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    assert dist.get_world_size() == 2
    with summon(module):
        assert not torch.equal(module[0][0].weight, mlp()[0][0].weight)
