"""Layers that run again in backward, that drop rows, and in half precision, over ranks."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from par_layers import LoadBalancing, RouterConfig, RouterLosses, layer_set, update_correction_bias_
from par_testing import storm

from .worlds import TOKENS, Tokens, world

WORLDS = {
    2: [{"expert": 2}, {"expert": {"size": 2, "tensor": 1}, "tp": 2}, {"sp": 2}],
    4: [{"expert": 2, "sp": 2}, {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2}],
}


@pytest.mark.ranks([storm(2), 4])
def test_a_checkpoint_changes_no_bit_over_ranks_nemo_2635_3325():
    """Two layers, of which one or both run again; counts and losses too. There, a near-tie was routed anew."""
    for parallel in WORLDS[dist.get_world_size()]:
        with world(parallel) as here:
            found = []
            for reentrant, times in ((None, 0), (False, 1), (False, 2), (True, 2)):
                balance = LoadBalancing(aux_loss_coef=0.1, z_loss_coef=0.01, bias_update_rate=1e-3)
                tokens = Tokens(rows=(2, 2) if "sequence" in parallel else (2, 1))
                layers = [
                    tokens.make(
                        here.layers, num_shared_experts=1, balance=balance, router=RouterConfig(correction_bias=True)
                    )
                    for _ in range(2)
                ]
                torch.manual_seed(1)
                x = here.layers.split(tokens.of(here.replica)).detach().requires_grad_()
                y = x
                for number, layer in enumerate(layers):
                    y = checkpoint(layer, y, use_reentrant=reentrant) if number < times else layer(y)
                y.square().sum().backward()
                taken = [RouterLosses(layer).take() for layer in layers]
                gradients = [parameter.grad for layer in layers for parameter in layer.parameters()]
                found.append([y.detach(), x.grad, *gradients, *(value for each in taken for value in each.values())])
            for other in found[1:]:
                assert len(other) == len(found[0])
                assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)), parallel


@pytest.mark.ranks(2)
def test_layers_that_run_again_leave_no_tensor_behind_torchtitan_1467():
    """There, each step of a checkpoint around torch's own exchange with autograd kept its results for ever."""
    with world({"expert": 2}) as here:
        layer = TOKENS["uneven"].make(
            here.layers, num_shared_experts=1, balance=LoadBalancing(aux_loss_coef=0.1, z_loss_coef=0.01)
        )
        alive = []
        for _ in range(4):
            for reentrant in (False, True):
                x = TOKENS["uneven"].of(here.replica).requires_grad_()
                checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
            update_correction_bias_(layer, here.groups)
            layer.zero_grad()
            RouterLosses(layer).take()
            del x
            gc.collect()
            alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        # A leak grows in each step. More in one step are fine, since a thread of gloo lets go of tensors later, and so
        # are fewer, because another test's tensors may go in the meantime.
        assert min(alive[2:]) <= alive[1], alive
        assert torch._C._distributed_c10d._get_work_registry_size() == 0  # exchanges that nobody has waited for


@pytest.mark.ranks(2)
def test_rows_beyond_a_capacity_are_dropped_and_counted_where_tokens_are_cut_unevenly():
    """Three tokens over two tensor ranks; all go to one expert, which takes one of each rank."""
    with world({"expert": {"size": 2, "tensor": 1}, "tp": 2}) as here:
        tokens = Tokens(rows=(1,), favoured=(5,), top_k=1)
        layer = tokens.make(here.layers, capacity_factor=1.0)
        free = tokens.make(layer_set(None))
        x = tokens.of(0)[:, :3]
        y, every = layer(x), free(x)
        taken = RouterLosses(layer).take()["dropped"]
        assert taken == 1 - dist.get_rank()  # rank 0 has two tokens, rank 1 has one
        kept = y.abs().sum(-1).ne(0)
        assert kept.sum() == 2
        torch.testing.assert_close(y[kept], every[kept], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_half_precision_routes_as_one_device_and_is_near_it():
    """The router computes in fp32, so the choice is the same; the sums of bf16 are in another order."""
    for parallel in WORLDS[2]:
        with world(parallel) as here:
            layer, whole = (
                TOKENS["uneven"].make(layers, num_shared_experts=1).to(torch.bfloat16)
                for layers in (here.layers, layer_set(None))
            )
            x = TOKENS["uneven"].of(here.replica).to(torch.bfloat16)
            y = here.layers.gather(layer(here.layers.split(x)))
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y, whole(x), rtol=0.02, atol=0.02)


@pytest.mark.ranks(2)
def test_the_input_may_need_no_gradient_and_the_router_may_be_frozen():
    for parallel in WORLDS[2]:
        with world(parallel) as here:
            layer = TOKENS["uneven"].make(here.layers, num_shared_experts=1)
            layer.gate.requires_grad_(False)
            x = here.layers.split(TOKENS["uneven"].of(here.replica)).detach()
            layer(x).square().sum().backward()
            assert layer.gate.weight.grad is None
            assert layer.experts.down_proj.grad is not None
            with torch.no_grad():
                assert not layer(x).requires_grad
