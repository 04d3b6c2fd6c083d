"""What autograd, and what watches it, make of the products over one axis; their results are in test_linear.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..helpers import FROM_4, filled, modes, numbers
from ..helpers import PRODUCTS as WAYS

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
COLLECTIVES = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


def saving(operations):
    """The contexts of a selective checkpoint that saves what these operations give."""

    def policy(_, operation, *__, **___):
        return CheckpointPolicy.MUST_SAVE if operation in operations else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.ranks(FROM_4)
def test_selective_checkpointing_computes_the_same():
    for mode in modes(WAYS[dist.get_world_size()]):
        layers = mode.layers
        # The norm's backward needs what the row gives, so that it is computed again, or taken as it was saved.
        block = filled(nn.Sequential(layers.ColumnLinear(16, 32), layers.RowLinear(32, 16), layers.LayerNorm(16)))
        x = layers.split(numbers(8, 8, 16))
        expected = gradients(block, x, block)
        for saved in (PRODUCTS, COLLECTIVES, PRODUCTS | COLLECTIVES):
            run = partial(checkpoint, block, use_reentrant=False, context_fn=saving(saved))
            for here, there in zip(gradients(block, x, run), expected, strict=True):
                assert torch.equal(here, there), mode.tensor


def gradients(block, x, run):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(run(x).square().sum(), (x, *block.parameters()))


@pytest.mark.ranks(2)
def test_a_gradient_of_a_rows_gradient_is_refused():
    for mode in modes():
        row, x = filled(mode.layers.RowLinear(4, 5)), numbers(3, 4, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(row(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it starts
@pytest.mark.ranks(2)
def test_forward_mode_differentiation_of_a_row_is_refused():
    for mode in modes():
        row, x = filled(mode.layers.RowLinear(4, 5)), numbers(3, 4, 2)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
            row(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.ranks(2)
def test_a_row_without_gradients():
    for mode in modes():
        row, x = filled(mode.layers.RowLinear(4, 5)), numbers(3, 4, 2)
        expected = row(x).detach()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(row(x), expected)
