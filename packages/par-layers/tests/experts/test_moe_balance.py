"""Losses of balance, counts and the bias of the choice in whole layers over ranks: those of one device."""

import pytest
import torch
import torch.distributed as dist

from par_layers import LoadBalancing, RouterConfig, RouterLosses, layer_set, update_correction_bias_
from par_testing import assert_equal_to_one_device, storm

from .worlds import Tokens, world

EXACT = 1e-12
"""Sums of some hundred numbers of order 1 in another order, in fp64."""

EVEN = Tokens(rows=(2,))

WORLDS = {
    2: [{"expert": 2}, {"tp": 2}, {"sp": 2}, {"expert": {"size": 2, "tensor": 1}, "tp": 2}, {"sequence": 2}],
    4: [
        {"expert": 4},
        {"expert": 2, "tp": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 2}, "tp": 2, "sequence": 2},
        {"expert": 2, "sequence": 2},
    ],
    8: [{"expert": 2, "sequence": 2}, {"expert": 2, "sequence": 2, "tp": 2}],
}


def joined(here):
    """The rows of each batch as one device has them: the parts of its sequence ranks one after another."""
    parts = here.groups.size("sequence")
    expert = here.groups.size("expert")
    batches = []
    for number in range(here.replicas // parts):
        data, other = divmod(number, expert)
        batches.append(torch.cat([EVEN.of((data * parts + part) * expert + other) for part in range(parts)], 1))
    return batches


def check_losses(parallel, over):
    """The gradient of the losses alone, and what they were."""
    with world(parallel) as here:
        balance = LoadBalancing(aux_loss_coef=0.1, scope=over, z_loss_coef=0.01)
        layer = EVEN.make(here.layers, balance=balance)
        y = layer(here.layers.split(EVEN.of(here.replica)))
        (y * 0.0).sum().backward()
        here.average_(layer)
        batches = joined(here)
        if over == "step":
            batches, balance = (
                [torch.cat(batches)],
                LoadBalancing(aux_loss_coef=0.1, scope="microbatch", z_loss_coef=0.01),
            )
        whole = EVEN.make(layer_set(None), balance=balance)
        RouterLosses(whole).scale = 1 / len(batches)
        for batch in batches:
            (whole(batch) * 0.0).sum().backward()
        assert whole.gate.weight.grad.abs().max() > 1e-4
        assert_equal_to_one_device(layer, whole, gradients=True, rtol=EXACT, atol=EXACT, reason="sums in another order")


@pytest.mark.storm
@pytest.mark.ranks([storm(2), 4])
def test_losses_do_not_depend_on_tensor_ranks_nor_on_any_others_megatron_5047():
    """There the loss of balance grew with the tensor ranks."""
    for number, parallel in enumerate(WORLDS[dist.get_world_size()]):
        for over in ("sequence", "microbatch", "step")[number % 2 :]:
            try:
                check_losses(parallel, over)
            except BaseException as error:
                error.add_note(f"over {over} in {parallel}")
                raise


@pytest.mark.ranks(8)
@pytest.mark.storm
def test_losses_over_every_axis_at_once():
    for parallel in WORLDS[8]:
        for over in ("sequence", "microbatch", "step"):
            check_losses(parallel, over)


@pytest.mark.ranks([storm(2), 4])
def test_counts_and_the_bias_of_the_choice_are_those_of_one_device_torchtitan_4148():
    """Four microbatches a step, with masked tokens and an evaluation between: neither counts, which it did there."""
    for parallel in WORLDS[dist.get_world_size()]:
        with world(parallel) as here:
            options = {"balance": LoadBalancing(bias_update_rate=1e-3), "router": RouterConfig(correction_bias=True)}
            layer, whole = EVEN.make(here.layers, **options), EVEN.make(layer_set(None), **options)
            for step in range(3):
                for micro in range(4):
                    generator = torch.Generator().manual_seed(10 * step + micro)
                    every = [
                        (EVEN.of(1000 * step + 100 * micro + replica), torch.rand(2, 4, generator=generator) < 0.8)
                        for replica in range(here.replicas)
                    ]
                    x, mask = every[here.replica]
                    layer(here.layers.split(x), mask)
                    for x, mask in every:
                        whole(x, mask)
                    layer.eval()(here.layers.split(EVEN.of(7)))
                    layer.train()
                update_correction_bias_(layer, here.groups)
                update_correction_bias_(whole)
                assert torch.equal(layer.gate.e_score_correction_bias, whole.gate.e_score_correction_bias), parallel
            assert layer.gate.e_score_correction_bias.unique().numel() > 1
            assert torch.equal(RouterLosses(layer).load()["gate"], RouterLosses(whole).load()["gate"])


@pytest.mark.ranks(2)
def test_a_rank_without_sequences_has_a_loss_of_zero():
    tokens = Tokens(rows=(2, 0))
    for parallel in ({"expert": 2}, {"data": 2}):
        with world(parallel) as here:
            layer = tokens.make(
                here.layers, balance=LoadBalancing(aux_loss_coef=0.1, scope="sequence", z_loss_coef=0.1)
            )
            layer(tokens.of(here.replica)).sum().backward()
            taken = RouterLosses(layer).take()
            assert torch.isfinite(taken["aux"])
            assert (taken["aux"] > 0) == (here.replica == 0)
            assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.ranks(2)
def test_parts_of_other_sequences_are_refused_on_every_rank():
    with world({"sequence": 2}) as here:
        layer = EVEN.make(here.layers, balance=LoadBalancing(aux_loss_coef=0.1))
        x = EVEN.of(0)[: 1 + dist.get_rank()]
        with pytest.raises(ValueError, match=r"ranks of 'sequence' hold parts of 1 to 2 sequences.* split one batch"):
            layer(x)
