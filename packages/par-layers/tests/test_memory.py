"""What autograd keeps, by mode: shapes alone matter, so one rank of each world is simulated on the fake backend."""

import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from par_layers import initialize
from par_layers.examples.gpt import Block
from par_testing import saved_bytes

from .helpers import simulated

B, S, H = 16, 16, 32


def kept(world, tensor, make, features, *, inner=False, frozen=False):
    """Bytes that rank 0 of a world saves in the forward of a layer; `frozen` are its weights, else nothing."""
    with simulated(world, tensor) as mode:
        layers = mode.layers
        module = make(layers)
        initialize(module, seed=0)
        module.requires_grad_(not frozen)
        layout = layers.rules.inner if inner else layers.rules.residual
        sizes = [layers.grid.size(axes) for axes in (layout.batch, layout.sequence, layout.features)]
        x = torch.randn(B // sizes[0], S // sizes[1], features // sizes[2], requires_grad=True)
        return saved_bytes(lambda: module(x), module.parameters())


def block(layers):
    return Block(layers, H, 8, 8)


@pytest.mark.ranks(1, init=False)
def test_at_equal_world_size_2d_to_3d_save_less_than_1d():
    for world, modes in {4: [{"mode": "2d"}], 8: [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}]}.items():
        in_1d = kept(world, {"mode": "1d"}, block, H)
        for tensor in modes:
            assert kept(world, tensor, block, H) < 0.6 * in_1d


@pytest.mark.ranks(1, init=False)
def test_linears_save_their_shards_and_nothing_that_was_gathered():
    whole = 4 * B * S * H  # bytes of an input [B, S, H], fp32
    shard = {
        (4, "1d", False): whole,
        (4, "1d", True): whole // 4,
        (4, "2d", None): whole // 4,
        (8, "2.5d", None): whole // 8,
        (8, "3d", None): whole // 8,
    }
    for (world, mode, sequence), expected in shard.items():
        options = {"depth": 2} if mode == "2.5d" else {"sequence_parallel": True} if sequence else {}
        tensor = {"mode": mode, **options}
        assert kept(world, tensor, lambda layers: layers.ColumnLinear(H, 4 * H), H) == expected
        rows = kept(world, tensor, lambda layers: layers.RowLinear(4 * H, H), 4 * H, inner=True)
        assert rows == 4 * whole // world


MODES = [
    (4, {"mode": "1d"}),
    (4, {"mode": "1d", "sequence_parallel": True}),
    (4, {"mode": "2d"}),
    (8, {"mode": "2.5d", "depth": 2}),
    (8, {"mode": "3d"}),
]


@pytest.mark.ranks(1, init=False)
def test_frozen_weights_save_no_activation():
    for world, tensor in MODES:
        assert kept(world, tensor, lambda layers: layers.ColumnLinear(H, 4 * H), H, frozen=True) == 0
        assert kept(world, tensor, lambda layers: layers.Linear(H, 4 * H), H, frozen=True) == 0
        assert kept(world, tensor, lambda layers: layers.RowLinear(4 * H, H), 4 * H, inner=True, frozen=True) == 0


@pytest.mark.ranks(1, init=False)
def test_an_input_without_gradient_saves_no_weight():
    for world, tensor in MODES:
        with simulated(world, tensor) as mode:
            column = mode.layers.ColumnLinear(H, 4 * H, bias=False)
            initialize(column, seed=0)
            x = mode.layers.split(torch.randn(B, S, H))
            with torch.autocast("cpu", torch.bfloat16):  # what is saved of the weight is a copy, so that it counts
                assert saved_bytes(lambda: column(x), column.parameters()) == 2 * x.numel()  # noqa: B023


class Flight:
    """A reduction that holds its tensor, as a backend does, until nobody holds the reduction."""

    def __init__(self, partial):
        self.partial = partial

    def wait(self):
        """It has always landed."""


@pytest.mark.ranks(1, init=False)
def test_the_partial_sums_of_summas_backward_do_not_grow_with_the_square():
    peaks = []
    for q in (4, 6):
        with simulated(q * q, {"mode": "2d"}) as mode:
            column = mode.layers.ColumnLinear(4 * q, 4 * q, bias=False)
            initialize(column, seed=0)
            y = column(torch.ones(2, 3, 4, requires_grad=True))
            partials, alive = [], []

            def reduce(partial, *_, partials=partials, alive=alive, **__):
                partials.append(weakref.ref(partial))
                alive.append(sum(each() is not None for each in partials))
                return Flight(partial)

            with patch.object(dist, "reduce", reduce):
                y.sum().backward()
            assert len(partials) == 2 * q
            peaks.append(max(alive))
    assert peaks == [6, 6]  # of each of the two gradients: this rank's own, one in flight, one that starts
