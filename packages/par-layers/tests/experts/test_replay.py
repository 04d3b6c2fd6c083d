"""What runs again in backward is given the choice of its forward."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_layers import LoadBalancing, RouterConfig, initialize, layer_set, update_correction_bias_

from ..helpers import numbers
from .toy import EXPERTS, HIDDEN, TOP_K, Layer, filled

LENGTH = 40
reentrant_or_not = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Noisy(nn.Module):
    """A layer whose input is another one each time it runs, as where sums are in another order, but far more so.

    Args:
        layer: The layer.
        noise: How large the difference is, of numbers around 1.
    """

    def __init__(self, layer, noise=0.1):
        super().__init__()
        self.layer, self.noise, self.runs = layer, noise, 0

    def forward(self, x):
        self.runs += 1
        return self.layer(x + self.noise * numbers(*x.shape, seed=100 + self.runs))


def noisy(**options):
    return Noisy(
        filled(Layer(balance=LoadBalancing(aux_loss_coef=0.1, scope="microbatch", z_loss_coef=0.1), **options))
    )


def start(seed=5):
    return numbers(LENGTH, HIDDEN, seed=seed).requires_grad_()


@reentrant_or_not
def test_a_recompute_takes_the_choice_of_its_forward_though_scores_have_changed(reentrant):
    """NeMo Automodel routes near-ties anew in recompute, and its checkpoint raises (#2635, #3325)."""
    layer = noisy()
    for attempt in range(2):  # this noise does change choices
        layer(start())
        assert (not torch.equal(layer.layer.ids[0], layer.layer.ids[-1])) == bool(attempt)
    del layer.layer.ids[:]
    checkpoint(layer, start(), use_reentrant=reentrant).sum().backward()
    first, again = layer.layer.ids
    assert torch.equal(first, again)


@reentrant_or_not
def test_a_row_keeps_its_slot_in_recompute_though_gates_have_swapped(reentrant):
    """Two tokens of the same scores and other features compete, and noise of 1e-8 says each time which is first."""
    layer = layer_set(None).MoE(
        HIDDEN, 6, EXPERTS, TOP_K, capacity_factor=1.0, router=RouterConfig(norm_topk_prob=False)
    )
    initialize(layer, seed=1, dtype=torch.float64)
    x, upstream = numbers(4, 16, HIDDEN), numbers(4, 16, HIDDEN, seed=7)
    x[0] = x[1]
    x[0, :, -1], x[1, :, -1] = -3.0, 3.0
    with torch.no_grad():
        layer.gate.weight[:, -1] = 0.0
    found = []
    for again in (False, True):
        layer.zero_grad()
        mine, noisy_layer = x.clone().requires_grad_(), Noisy(layer, noise=1e-8)
        y = checkpoint(noisy_layer, mine, use_reentrant=reentrant) if again else noisy_layer(mine)
        (y * upstream).sum().backward()
        found.append([mine.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-5)  # a thousand times the noise


@reentrant_or_not
def test_two_graphs_that_wait_each_get_their_own_choice(reentrant):
    layer = noisy()
    one, other = (checkpoint(layer, start(seed), use_reentrant=reentrant) for seed in (5, 6))
    one.sum().backward()
    other.sum().backward()
    first, second, first_again, second_again = layer.layer.ids
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)
    assert not torch.equal(first, second)


@reentrant_or_not
def test_backward_may_be_in_the_other_order(reentrant):
    layer = noisy()
    one, other = (checkpoint(layer, start(seed), use_reentrant=reentrant) for seed in (5, 6))
    other.sum().backward()
    one.sum().backward()
    first, second, second_again, first_again = layer.layer.ids
    assert torch.equal(first, first_again)
    assert torch.equal(second, second_again)


@reentrant_or_not
def test_a_checkpoint_within_a_checkpoint_chooses_once(reentrant):
    layer = noisy()

    def outer(x):
        return checkpoint(layer, x, use_reentrant=reentrant)

    checkpoint(outer, start(), use_reentrant=reentrant).sum().backward()
    assert len(layer.layer.ids) >= 2
    assert all(torch.equal(ids, layer.layer.ids[0]) for ids in layer.layer.ids)


@reentrant_or_not
def test_gradients_are_those_without_a_checkpoint(reentrant):
    gradients = []
    for kind in (None, reentrant):
        layer, x = filled(Layer(balance=LoadBalancing(aux_loss_coef=0.1, scope="step", z_loss_coef=0.1))), start()
        for _ in range(2):  # over a step, the second microbatch counts the first one's choices, and its own once
            y = layer(x) if kind is None else checkpoint(layer, x, use_reentrant=kind)
            y.square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@reentrant_or_not
def test_a_frozen_router_is_replayed_too(reentrant):
    layer = noisy()
    layer.layer.gate.requires_grad_(False)
    x = numbers(LENGTH, HIDDEN)  # without a gradient, so that scores have no graph
    frozen = x.requires_grad_() if reentrant else x  # a reentrant checkpoint needs an input with a gradient
    checkpoint(layer, frozen, use_reentrant=reentrant).sum().backward()
    first, again = layer.layer.ids
    assert torch.equal(first, again)


@reentrant_or_not
def test_without_the_generators_state_a_recompute_is_refused(reentrant):
    layer = filled(Layer())
    y = checkpoint(layer, start(), use_reentrant=reentrant, preserve_rng_state=False)
    with pytest.raises(ValueError, match="pass preserve_rng_state=True to the checkpoint"):
        y.sum().backward()


def test_forwards_that_begin_with_the_same_seed_are_not_mixed_up():
    layer = noisy()
    waiting = []
    for seed in (5, 6):
        torch.manual_seed(0)
        waiting.append(checkpoint(layer, start(seed), use_reentrant=False))
    with pytest.raises(ValueError, match="remove the calls that seed it between microbatches"):
        waiting[1].sum().backward()


def test_the_same_seed_each_step_is_fine():
    layer = filled(Layer())
    for seed in (5, 6):
        torch.manual_seed(0)
        checkpoint(layer, start(seed), use_reentrant=False).sum().backward()


def test_a_choice_is_kept_no_longer_than_its_graph():
    layer = filled(Layer())
    layer(start())
    assert len(layer.gate.replay) == 0  # outside of a checkpoint nothing is kept
    y = checkpoint(layer, start(), use_reentrant=False)
    assert len(layer.gate.replay) == 1
    y.sum().backward()
    del y
    gc.collect()
    assert len(layer.gate.replay) == 0


def test_what_a_reentrant_checkpoint_left_is_dropped_by_the_next_forward_or_the_end_of_the_step():
    layer = filled(Layer())
    for _ in range(3):
        checkpoint(layer, start(), use_reentrant=True).sum().backward()
        assert len(layer.gate.replay) == 1
    with torch.no_grad():
        layer(start())  # in training, where nobody can know that no recompute will come
    update_correction_bias_(layer)
    assert len(layer.gate.replay) == 0


def test_evaluation_draws_no_numbers_and_keeps_nothing():
    layer = filled(Layer(balance=LoadBalancing(aux_loss_coef=0.1, scope="microbatch"))).eval()
    state = torch.get_rng_state()
    checkpoint(layer, start(), use_reentrant=False).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.gate.load.counts is None
    assert len(layer.gate.replay) == 0


def test_forwards_that_can_have_no_graph_keep_nothing():
    layer = filled(Layer())
    with torch.inference_mode():
        layer(start().detach())
    assert len(layer.gate.replay) == 0


def test_choices_are_kept_in_two_bytes():
    layer = filled(Layer())
    y = checkpoint(layer, start(), use_reentrant=False)
    (kept,) = layer.gate.replay._of_graphs.values()
    assert kept.ids.nbytes == 2 * LENGTH * TOP_K
    assert EXPERTS < 1 << 15
    y.sum().backward()
