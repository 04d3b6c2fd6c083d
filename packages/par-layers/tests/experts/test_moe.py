"""Whole layers over ranks against the dense loop on one device: outputs and every gradient, in fp64."""

import pytest
import torch
import torch.distributed as dist

from par_layers import layer_set
from par_testing import assert_equal_to_one_device

from .dense import mixture
from .worlds import TOKENS, world

EXACT = 1e-12
"""Sums of some hundred numbers of order 1 in another order, in fp64."""

WORLDS = {
    2: [
        {"expert": 2},
        {"tp": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2},
        {"expert": {"size": 2, "tensor": 1}, "sp": 2},
        {"expert": {"size": 1, "tensor": 1}, "tp": 2},
        {"sp": 2},
    ],
    4: [
        {"expert": 4},
        {"expert": 2},
        {"expert": 2, "tp": 2},
        {"expert": 2, "sp": 2},
        {"expert": {"size": 4, "tensor": 1}, "tp": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2},
        {"expert": {"size": 2, "tensor": 1}, "sp": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 2}, "sp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sequence": 2},
        {"expert": 2, "sequence": 2},
    ],
    8: [
        {"expert": 4, "tp": 2},
        {"expert": {"size": 4, "tensor": 2}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 2}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "sp": 2, "sequence": 2},
        {"expert": {"size": 2, "tensor": 1}, "tp": 2, "sequence": 2},
        {"expert": {"size": 4, "tensor": 1}, "tp": 2, "sequence": 4},
        {"expert": {"size": 8, "tensor": 1}, "sp": 2},
        {"expert": 2, "sp": 2, "sequence": 2},
        {"expert": 4},
    ],
}
"""By number of ranks: every expert parallelism with experts that are whole or cut, with and without copies of them."""


def check_equal_to_the_loop(parallel, tokens, **options):
    """Forward and backward of a layer in a world, and of the loop over the tokens of all replicas."""
    with world(parallel) as here:
        parallel_layer, whole = tokens.make(here.layers, **options), tokens.make(layer_set(None), **options)
        mine = tokens.of(here.replica).requires_grad_()
        weights = [torch.randn_like(tokens.of(replica)) for replica in range(here.replicas)]
        for replica, weight in enumerate(weights):
            weight.copy_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(replica), dtype=weight.dtype)
            )
        y = here.layers.gather(parallel_layer(here.layers.split(mine)))
        (y * weights[here.replica]).sum().backward()
        here.average_(parallel_layer)
        state = dict(whole.named_parameters())
        for parameter in state.values():
            parameter.grad = torch.zeros_like(parameter)  # that of a world without any token
        inputs = [tokens.of(replica).requires_grad_() for replica in range(here.replicas)]
        outputs = [mixture(state, x, tokens.top_k) for x in inputs]
        (sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)) / here.replicas).backward()
        torch.testing.assert_close(y, outputs[here.replica], rtol=EXACT, atol=EXACT)
        expected = inputs[here.replica].grad * here.replicas
        torch.testing.assert_close(mine.grad, expected, rtol=EXACT, atol=EXACT)
        assert_equal_to_one_device(
            parallel_layer, whole, gradients=True, rtol=EXACT, atol=EXACT, reason="sums in another order"
        )


def covering(worlds):
    """Each world and each distribution of tokens at least once."""
    names = list(TOKENS)
    count = max(len(worlds), len(names))
    return [(worlds[number % len(worlds)], names[number % len(names)]) for number in range(count)]


def run(pairs, **options):
    for parallel, name in pairs:
        try:
            check_equal_to_the_loop(parallel, TOKENS[name], **options)
        except BaseException as error:
            error.add_note(f"{name} in {parallel}")
            raise


@pytest.mark.ranks([2, 4])
def test_a_layer_over_ranks_is_the_dense_loop():
    run(covering(WORLDS[dist.get_world_size()]), shared=1)
