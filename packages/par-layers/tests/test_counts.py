"""What every layer communicates, counted, and equal to the formula on paper: one collective too many is a failure.

Counted are elements that a rank receives, forward and backward: an all-reduce of n over g ranks 2(g-1)/g n, an
all-gather or reduce-scatter (g-1)/g of the full size, a broadcast or reduce, averaged over roots, (g-1)/g n.
M = tokens, K = in features, N = out features, H = width, V = vocabulary.
"""

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_layers import PartialGradientReducer, layer_set
from par_layers.examples.gpt import Block
from par_testing import Counted, count_collectives, storm

from .helpers import MODES, filled, integers, numbers

B, S = 8, 4
M = B * S


@dataclass(frozen=True)
class Formulas:
    """The numbers of one mode on the ranks there are."""

    p: int
    sequence: bool = False
    q: int = 1
    depth: int = 1
    d: int = 1
    square: bool = False

    def column(self, k: int, n: int) -> Fraction:
        return self.linear(k, n, (3 if self.sequence else 2) * M * k)

    def row(self, k: int, n: int) -> Fraction:
        return self.linear(k, n, 2 * M * n)

    def linear(self, k: int, n: int, moved_in_1d: int) -> Fraction:
        if self.d > 1:
            return Fraction(self.d - 1, self.d**3) * (3 * M * k + 3 * k * n + 2 * M * n)
        if self.square:
            return Fraction(3 * (self.q - 1), self.q**2) * (Fraction(M * k, self.depth) + k * n)
        return Fraction(self.p - 1, self.p) * moved_in_1d

    def norm(self, numbers_a_token: int) -> Fraction:
        """A LayerNorm sums 4 numbers a token, RMSNorm 2: each is an all-reduce, forward or backward."""
        if self.d > 1:
            return 2 * numbers_a_token * Fraction(self.d - 1, self.d**3) * M
        return 2 * numbers_a_token * Fraction(self.q - 1, self.q**2) * Fraction(M, self.depth)

    def embedding(self, v: int, h: int) -> Fraction:
        if self.d > 1:
            return 2 * Fraction(self.d - 1, self.d**3) * (M * h + v * h)
        if self.square:
            return 2 * Fraction(self.q - 1, self.q**2) * Fraction(M * h, self.depth)
        return 2 * Fraction(self.p - 1, self.p) * M * h

    def swaps(self, local: int, own: bool) -> int:
        """One there and one back, unless the partner is the rank itself."""
        return 0 if own else 2 * local

    # Once a step

    def vectors(self, h: int) -> Fraction:
        """The gradient of h elements of biases and norms, each rank having h/q or h/d of them."""
        if self.d > 1:
            return all_reduce(self.d**2, Fraction(h, self.d))
        if self.square:
            return all_reduce(self.q * self.depth, Fraction(h, self.q))
        return Fraction(0)

    def over_depth(self, elements: int) -> Fraction:
        return all_reduce(self.depth, Fraction(elements, self.q**2)) if self.square else Fraction(0)


def all_reduce(g: int, n: Fraction) -> Fraction:
    return 2 * Fraction(g - 1, g) * n


FORMULAS = {
    ("1d", 2): Formulas(2),
    ("1d", 4): Formulas(4),
    ("2d", 4): Formulas(4, q=2, square=True),
    ("2.5d", 4, 1): Formulas(4, q=2, depth=1, square=True),
    ("2.5d", 4, 4): Formulas(4, q=1, depth=4, square=True),
    ("2.5d", 8, 2): Formulas(8, q=2, depth=2, square=True),
    ("3d", 8): Formulas(8, d=2),
    ("1d+sequence", 2): Formulas(2, sequence=True),
    ("1d+sequence", 4): Formulas(4, sequence=True),
}


def live():
    """Formulas, layers and groups of every mode of this world."""
    world = dist.get_world_size()
    for tensor in MODES[world]:
        name = tensor["mode"] + ("+sequence" if "sequence_parallel" in tensor else "")
        with ProcessGroups(Topology.from_config({"tensor": {"size": world, **tensor}}, world)) as groups:
            yield (
                FORMULAS[name, world, *([tensor["depth"]] if "depth" in tensor else [])],
                layer_set("auto", groups),
                groups,
            )


def received(model, x: torch.Tensor, groups: ProcessGroups) -> tuple[Fraction, Fraction]:
    """In forward and backward, and once a step."""
    each, once = counts(model, x, groups)
    return each, once.received()


def counts(model, x: torch.Tensor, groups: ProcessGroups) -> tuple[Fraction, Counted]:
    """What is received in forward and backward, and all that is counted once a step."""
    x = x.requires_grad_() if x.is_floating_point() else x
    with count_collectives() as counted:
        model(x).nan_to_num(neginf=0.0).sum().backward()
    with count_collectives() as once:
        PartialGradientReducer(model, groups).handle_gradient()
    return counted.received(), once


@pytest.mark.ranks([storm(2), 4, storm(8)])
def test_every_layer_communicates_what_its_formula_says():
    for mode in live():
        for check in CHECKS:
            check(*mode)


def check_linears(formula, layers, groups):
    k, n = 16, 24
    x = layers.split(numbers(B, S, k)).detach()
    column = filled(layers.ColumnLinear(k, n, bias=False))
    assert received(column, x, groups) == (formula.column(k, n), formula.over_depth(k * n))
    hidden = column(x).detach()
    row = filled(layers.RowLinear(n, k, bias=False))
    assert received(row, hidden, groups) == (formula.row(n, k), formula.over_depth(k * n))
    blocks = filled(layers.ColumnLinear(k, 3 * n, bias=False, blocks=3))  # q, k and v move x once
    assert received(blocks, x, groups) == (formula.column(k, 3 * n), formula.over_depth(3 * k * n))


def check_an_mlp_and_its_biases(formula, layers, groups):
    k, n = 16, 64
    x = layers.split(numbers(B, S, k)).detach()
    model = filled(torch.nn.Sequential(layers.ColumnLinear(k, n), torch.nn.ReLU(), layers.RowLinear(n, k)))
    each, once = received(model, x, groups)
    assert each == formula.column(k, n) + formula.row(n, k)
    row_bias = all_reduce(formula.p, Fraction(k)) if formula.sequence else 0
    assert once == formula.over_depth(2 * k * n) + formula.vectors(n + k) + row_bias


def check_a_linear_is_a_column_and_the_way_back(formula, layers, groups):
    k, n = 16, 24
    model = filled(layers.Linear(k, n, bias=False))
    each, _ = received(model, layers.split(numbers(B, S, k)).detach(), groups)
    if formula.sequence:  # an all-to-all each way
        back = 2 * Fraction(formula.p - 1, formula.p) * Fraction(M * n, formula.p)
    elif formula.square:
        back = Fraction(0)
    elif formula.d > 1:
        own = groups.rank("output") == groups.rank("input")
        back = formula.swaps(M * n // formula.d**3, own)
    else:  # an all-gather; its backward takes a part
        back = Fraction(formula.p - 1, formula.p) * M * n
    assert each == formula.column(k, n) + back


def check_norms(formula, layers, groups):
    h = 16
    x = layers.split(numbers(B, S, h)).detach()
    of_vector = all_reduce(formula.p, Fraction(h)) if formula.sequence else formula.vectors(h)
    assert received(filled(layers.LayerNorm(h)), x, groups) == (formula.norm(4), 2 * of_vector)
    assert received(filled(layers.RMSNorm(h)), x, groups) == (formula.norm(2), of_vector)


def check_a_vocabulary_embedding(formula, layers, groups):
    v, h = 32, 16
    model = filled(layers.VocabEmbedding(v, h))
    assert received(model, integers(v, B, S), groups) == (formula.embedding(v, h), formula.over_depth(v * h))


def check_vocabulary_classifiers(formula, layers, groups):
    v, h = 32, 16
    x = layers.split(numbers(B, S, h)).detach()
    own = filled(layers.VocabClassifier(h, v))
    assert received(own, x, groups) == (formula.column(h, v), formula.over_depth(v * h))
    table = layers.VocabEmbedding(v, h)
    tied = filled(layers.VocabClassifier(h, v, tied=table))
    diagonal = not formula.square or groups.rank("row") == groups.rank("col")
    swaps = formula.swaps(v * h // formula.q**2, diagonal)
    assert received(tied, x, groups) == (formula.column(h, v) + swaps, formula.over_depth(v * h))


def check_a_whole_transformer_layer(formula, layers, groups):
    h = 16
    model = filled(Block(layers, h, 4, 4))
    each, counted = counts(model, layers.split(numbers(B, S, h)).detach(), groups)
    once = counted.received()
    p, q, d, bsh, hh = formula.p, formula.q, formula.d, M * h, h * h
    if formula.d > 1:
        linears = Fraction(d - 1, d**3) * (39 * bsh + 36 * hh)
    elif formula.square:
        linears = Fraction(3 * (q - 1), q * q) * (Fraction(7 * bsh, formula.depth) + 12 * hh)
    else:
        linears = Fraction(p - 1, p) * (10 if formula.sequence else 8) * bsh
    assert each == linears + 2 * formula.norm(4)
    # Biases: 3h + h + 4h + h; norms: 4h. With sequence parallelism those of rows and of norms are partial.
    vectors = all_reduce(p, Fraction(6 * h)) if formula.sequence else formula.vectors(13 * h)
    assert once == formula.over_depth(12 * hh) + vectors
    # Sums over one set of axes are one collective.
    sets = {"1d": 0, "1d+sequence": 1, "2d": 1, "2.5d": 1 if 1 in (formula.q, formula.depth) else 2, "3d": 2}
    assert counted.calls() == sets[layers.mode + ("+sequence" if formula.sequence else "")]


def check_what_needs_no_gradient_moves_nothing_in_backward(formula, layers, groups):
    k, n = 16, 24
    x, frozen = layers.split(numbers(B, S, k)).detach(), filled(layers.ColumnLinear(k, n, bias=False))
    with count_collectives() as forward:
        frozen(x)
    frozen.weight.requires_grad_(False)
    with count_collectives() as counted:
        frozen(x.requires_grad_()).sum().backward()
    if formula.d > 1:
        backward = Fraction(formula.d - 1, formula.d**3) * (M * k + k * n + M * n)
    elif formula.square:
        backward = Fraction(formula.q - 1, formula.q**2) * (Fraction(M * k, formula.depth) + k * n)
    else:
        backward = Fraction(formula.p - 1, formula.p) * (1 if formula.sequence else 2) * M * k
    assert counted.received() == forward.received() + backward


def check_the_cross_entropy_moves_three_numbers_a_token(formula, layers, groups):
    v = 32
    layout = layers.rules.inner
    parts, tokens = layers.grid.size(layout.features), layers.grid.size(layout.tokens)
    logits = numbers(B // layers.grid.size(layout.batch), S, v // parts).requires_grad_()
    with count_collectives() as counted:
        layers.cross_entropy(logits, integers(v, B, S), classes=v).backward()
    a_token = all_reduce(parts, Fraction(3 * M, tokens))  # the largest logit; the sum and the target's
    assert counted.received() == a_token + all_reduce(tokens, Fraction(1))  # the mean; backward moves nothing


CHECKS = [
    check_linears,
    check_an_mlp_and_its_biases,
    check_a_linear_is_a_column_and_the_way_back,
    check_norms,
    check_a_vocabulary_embedding,
    check_vocabulary_classifiers,
    check_a_whole_transformer_layer,
    check_what_needs_no_gradient_moves_nothing_in_backward,
    check_the_cross_entropy_moves_three_numbers_a_token,
]
