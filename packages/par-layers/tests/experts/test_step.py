"""Counts, the bias of the choice, and what a router says of a step: the same wherever and however often layers run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_groups import ProcessGroups, Topology
from par_layers import Grid, LoadBalancing, Router, RouterConfig, RouterLosses, TokenAxes, update_correction_bias_
from par_testing import count_collectives

from ..helpers import numbers
from .toy import EXPERTS, HIDDEN, TOP_K, Layer, filled

RATE, LENGTH, MICROBATCHES, STEPS = 0.05, 7, 4, 3
KINDS = {"no checkpoint": None, "non-reentrant": False, "reentrant": True}


class Model(nn.Module):
    """Three layers, of which some run again in backward."""

    def __init__(self, again=(), reentrant=None, **options):
        super().__init__()
        balance = LoadBalancing(bias_update_rate=RATE, aux_loss_coef=0.1, scope="microbatch")
        self.layers = nn.ModuleList(
            filled(Layer(balance=balance, **options, config=RouterConfig(correction_bias=True)), seed=seed)
            for seed in (3, 4, 5)
        )
        self.again, self.reentrant = again, reentrant

    def forward(self, x, mask=None):
        for number, layer in enumerate(self.layers):
            if self.training and number in self.again and self.reentrant is not None:
                x = checkpoint(layer, x, mask, use_reentrant=self.reentrant)
            else:
                x = layer(x, mask)
        return x


def trained(model, groups=None, *, ranks=1, rank=0):
    """The biases after some steps of several microbatches, with an evaluation between them."""
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            batch = numbers(4, LENGTH, HIDDEN, seed=10 * step + microbatch)
            x = batch.chunk(ranks)[rank].clone().requires_grad_()
            mask = torch.arange(LENGTH).expand(len(x), -1) < LENGTH - 1
            model(x, mask).square().sum().backward()
        model.eval()
        with torch.no_grad():
            model(numbers(4, LENGTH, HIDDEN, seed=99))  # torchtitan #4148: validation was counted
        model.train()
        update_correction_bias_(model, groups)
        model.zero_grad()
    return [layer.gate.e_score_correction_bias.clone() for layer in model.layers]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [(1,), (0, 1, 2)], ids=["some layers", "all layers"])
def test_the_bias_is_the_same_whichever_layers_run_again(kind, again):
    """Torchtitan counts tokens again where activations are recomputed, harmless only if all layers are."""
    expected = trained(Model())
    assert any(bias.count_nonzero() for bias in expected)
    for one, other in zip(expected, trained(Model(again, KINDS[kind])), strict=True):
        assert torch.equal(one, other)


def test_the_bias_moves_by_the_rate_towards_the_mean():
    router = filled(Layer(balance=LoadBalancing(bias_update_rate=RATE), config=RouterConfig(correction_bias=True))).gate
    router(numbers(20, HIDDEN))
    counts = router.load.counts
    update_correction_bias_(router)
    moved = torch.sign(20 * TOP_K - counts * EXPERTS).float() * RATE
    assert torch.equal(router.e_score_correction_bias, moved)
    update_correction_bias_(router)  # no tokens since
    assert torch.equal(router.e_score_correction_bias, moved)


def test_a_bias_balances():
    router = Router(
        HIDDEN,
        EXPERTS,
        1,
        balance=LoadBalancing(bias_update_rate=0.002),
        config=RouterConfig(scoring_func="sigmoid", correction_bias=True),
    )
    router.load_state_dict({"weight": numbers(EXPERTS, HIDDEN, seed=3)}, strict=False)
    x = numbers(600, HIDDEN, dtype=torch.float32)
    imbalances, losses = [], RouterLosses(router)
    for _ in range(200):
        router(x)
        imbalances.append(losses.take()["imbalance"].item())
        update_correction_bias_(router)
        losses.take()
    assert imbalances[0] > 1.3
    assert imbalances[-1] < 1.1


@pytest.mark.ranks(2)
def test_the_bias_of_two_ranks_is_that_of_one_in_one_collective_a_step():
    rank, expected = dist.get_rank(), trained(Model())
    with ProcessGroups(Topology.from_config({"data": 2}, 2)) as groups:
        options = {"grid": Grid(groups), "token_axes": TokenAxes(replicas=("data",))}
        for model, given in (
            (Model((1,), False, **options), groups),
            (Model((1,), False), dist.group.WORLD),  # routers that were made without groups
        ):
            biases = trained(model, given, ranks=2, rank=rank)
            with count_collectives() as counted:
                update_correction_bias_(model, given)
            assert counted.calls() == 1
            for here, one in zip(biases, expected, strict=True):
                assert torch.equal(here, one)


def test_masked_tokens_are_routed_and_not_counted():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch")))
    x, mask = numbers(2, LENGTH, HIDDEN), torch.arange(LENGTH).expand(2, -1) < 4
    layer(x, mask)
    padded = RouterLosses(layer).take()
    update_correction_bias_(layer)
    assert RouterLosses(layer).load()["gate"].sum() == 2 * 4 * TOP_K
    assert (layer.ids[0] < EXPERTS).all()
    alone = filled(Layer(balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch")))
    alone(x[:, :4])
    torch.testing.assert_close(padded["aux"], RouterLosses(alone).take()["aux"], rtol=1e-12, atol=0)


def test_what_was_taken_is_of_all_microbatches_since():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=0.5, scope="microbatch")))
    losses, values = RouterLosses(layer), []
    for seed in (1, 2):
        layer(numbers(2, LENGTH, HIDDEN, seed=seed))
        values.append(losses.take()["aux"])
    for seed in (1, 2):
        layer(numbers(2, LENGTH, HIDDEN, seed=seed))
    update_correction_bias_(layer)
    layer.gate.count_dropped(torch.tensor(3))
    layer.gate.count_dropped(torch.tensor(4))
    taken = losses.take()
    assert taken["dropped"] == 7
    torch.testing.assert_close(taken["aux"], sum(values) / 2, rtol=1e-12, atol=0)
    load = losses.load()["gate"]
    assert taken["imbalance"].item() == pytest.approx(load.max().item() / load.double().mean().item())
    assert not losses.take()


def test_a_model_without_routers_has_no_losses():
    losses = RouterLosses(nn.Linear(2, 2))
    losses.scale = 3.0
    assert losses.take() == losses.load() == {}
    update_correction_bias_(nn.Linear(2, 2))


@pytest.mark.ranks(2)
def test_take_with_groups_reduces_the_metrics_of_all_ranks():
    def counted(seed):
        model = Model()
        model(numbers(4, LENGTH, HIDDEN, seed=seed)).square().sum().backward()
        return RouterLosses(model)

    with ProcessGroups(Topology.from_config({}, 2)) as groups:
        taken = counted(dist.get_rank()).take(groups)
        alone = [counted(rank).take() for rank in range(2)]
        assert taken.keys() == {"aux", "imbalance"}
        torch.testing.assert_close(taken["aux"], sum(each["aux"].double() for each in alone) / 2)
        assert taken["imbalance"] == max(each["imbalance"].double() for each in alone)
