"""`layer_cost` against the formulas of whole layers, and against what is counted."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import (
    EmbeddingShape,
    LinearShape,
    NormShape,
    PartialGradientReducer,
    TransformerShape,
    initialize,
    layer_cost,
    layer_set,
)
from par_testing import count_collectives

from .helpers import MODES

B, S, H, V = 8, 4, 16, 32
M = B * S


@pytest.mark.parametrize(
    ("mode", "sizes", "expected"),
    [
        ("1d", {"tensor": 4}, lambda m, h: (Fraction(8 * 3, 4) * m * h, 0)),
        ("2d", {"row": 4, "col": 4}, lambda m, h: (Fraction(9, 16) * (7 * m * h + 12 * h * h), 0)),
        (
            "2.5d",
            {"depth": 2, "row": 2, "col": 2},
            lambda m, h: (Fraction(3, 4) * (Fraction(7 * m * h, 2) + 12 * h * h), Fraction(12 * h * h, 4)),
        ),
        ("3d", {"output": 2, "input": 2, "weight": 2}, lambda m, h: (Fraction(39 * m * h + 36 * h * h, 8), 0)),
        (None, {}, lambda m, h: (0, 0)),
    ],
)
def test_a_whole_transformer_layer(mode, sizes, expected):
    predicted = layer_cost(mode, sizes, TransformerShape(tokens=96, width=64))
    assert (predicted.each, predicted.once) == expected(96, 64)


def test_sequence_parallelism_gathers_once_more():
    predicted = layer_cost("1d", {"tensor": 4}, TransformerShape(tokens=96, width=64), sequence_parallel=True)
    assert predicted.each == Fraction(10 * 3, 4) * 96 * 64


def test_tokens_are_cut_over_sequence_ranks_and_weights_are_not():
    sizes, shape = {"row": 4, "col": 4}, TransformerShape(tokens=64, width=8)
    expected = layer_cost("2d", sizes, TransformerShape(tokens=16, width=8))
    assert layer_cost("2d", {**sizes, "sequence": 4}, shape) == expected
    assert layer_cost("2d", {**sizes, "ring": 2, "ulysses": 2}, shape) == expected
    assert layer_cost("1d", {"tensor": 4, "sequence": 3}, shape).each == layer_cost("1d", {"tensor": 4}, shape).each / 3


def test_where_2d_and_3d_begin_to_pay():
    """2D beats 1D on 16 ranks once tokens exceed 1.9 widths, 3D on 8 once they exceed 2.12."""

    def beats(mode, sizes, ranks, tokens):
        shape = TransformerShape(tokens=tokens, width=1000)
        return layer_cost(mode, sizes, shape).each < layer_cost("1d", {"tensor": ranks}, shape).each

    square, cube = {"row": 4, "col": 4}, {"output": 2, "input": 2, "weight": 2}
    assert not beats("2d", square, 16, 1890)
    assert beats("2d", square, 16, 1910)
    assert not beats("3d", cube, 8, 2110)
    assert beats("3d", cube, 8, 2130)


def test_wrong_questions_are_named():
    shape = NormShape(tokens=4, features=4)
    with pytest.raises(ValueError, match="no formulas for mode '4d'"):
        layer_cost("4d", {}, shape)
    with pytest.raises(ValueError, match="'depth' is missing"):
        layer_cost("2.5d", {"row": 2, "col": 2}, shape)


@pytest.mark.ranks([4, 8])
def test_the_prediction_is_what_is_counted():
    world = dist.get_world_size()
    for tensor in MODES[world]:
        topology = Topology.from_config({"tensor": {"size": world, **tensor}}, world)
        with ProcessGroups(topology) as groups:
            layers = layer_set("auto", groups)
            sequence = tensor.get("sequence_parallel", False)
            mode = tensor["mode"]
            for shape, module in shapes(layers):
                predicted = layer_cost(mode, topology.axes, shape, sequence_parallel=sequence)
                assert counted(layers, groups, shape, module) == (predicted.each, predicted.once), (tensor, shape)


def shapes(layers):
    yield LinearShape(tokens=M, k=H, n=2 * H), layers.ColumnLinear(H, 2 * H, bias=False)
    yield LinearShape(tokens=M, k=2 * H, n=H, role="row"), layers.RowLinear(2 * H, H, bias=False)
    yield NormShape(tokens=M, features=H), layers.LayerNorm(H)
    yield NormShape(tokens=M, features=H, mean=False), layers.RMSNorm(H)
    yield EmbeddingShape(tokens=M, features=H, vocabulary=V), layers.VocabEmbedding(V, H)


def counted(layers, groups, shape, module):
    """Elements received in forward and backward, and when partial gradients are summed."""
    initialize(module, seed=0)
    if isinstance(shape, EmbeddingShape):
        x = torch.zeros(B, S, dtype=torch.int64)
    else:
        layout = layers.rules.inner if getattr(shape, "role", "") == "row" else layers.rules.residual
        features = shape.k if isinstance(shape, LinearShape) else shape.features
        sizes = [layers.grid.size(axes) for axes in (layout.batch, layout.sequence, layout.features)]
        x = torch.randn(B // sizes[0], S // sizes[1], features // sizes[2], requires_grad=True)
    with count_collectives() as each:
        module(x).sum().backward()
    with count_collectives() as once:
        PartialGradientReducer(module, groups).handle_gradient()
    return each.received(), once.received()
