"""Parameters that hold one rank's part: on the meta device with a record and an init rule, until they are filled."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from par_groups import Box, Sharding, set_sharding

from ..modes.grid import Axes, Grid

Init = Callable[[Tensor, torch.Generator], object]
"""Fills a whole parameter in place; it never sees how the parameter is cut. A value: it can be copied and pickled."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A run of rows (dim 0) that is cut by itself, as q, k and v are in one fused weight.

    Args:
        length: Rows in the whole tensor.
        axes: Axes over which they are cut.
        padded: The length with padding, which divides; the padding is at the end, and no part of the tensor.
        sum_over: Further axes over which the gradient of these rows is partial.
    """

    length: int
    axes: Axes = ()
    padded: int | None = None
    sum_over: Axes = ()


def make_parameter(
    rows: Sequence[Rows], others: Sequence[tuple[int, Axes]], grid: Grid, init: Init, sum_over: Axes = ()
) -> nn.Parameter:
    """A parameter on the meta device that stands for this rank's part.

    Args:
        rows: The runs of dim 0, in order.
        others: Length and axes of each further dim; they divide.
        grid: Where this rank is.
        init: How the whole tensor is filled.
        sum_over: Axes over which the gradient is partial after backward; those of size 1 are left out.
    """
    shape = (sum(run.length for run in rows), *(length for length, _ in others))
    counts = [(run.padded or run.length) // grid.size(run.axes) for run in rows]
    rest = tuple(length // grid.size(axes) for length, axes in others)
    corner = tuple(grid.index(axes) * each for (_, axes), each in zip(others, rest, strict=True))
    stride = tuple(itertools.accumulate(reversed(rest), lambda a, b: a * b, initial=1))[::-1]
    boxes, first, local = [], 0, 0
    for run, count in zip(rows, counts, strict=True):
        start = grid.index(run.axes) * count
        held = min(count, run.length - start)  # less than count where the rest is padding
        if held > 0 and all(rest):
            boxes.append(
                Box(
                    start=(first + start, *corner),
                    size=(held, *rest),
                    offset=local * math.prod(rest),
                    stride=stride,
                    copies=grid.copies(_all_axes(run.axes, others)),
                    sum_over=grid.larger(sum_over + run.sum_over),
                )
            )
        first, local = first + run.length, local + count
    parameter = nn.Parameter(torch.empty(sum(counts), *rest, device="meta"))
    set_sharding(parameter, Sharding(shape, tuple(boxes)))
    parameter.par_init = init  # type: ignore[attr-defined]  # a tensor takes attributes
    return parameter


def normal(std: float) -> Init:
    """Normal around 0."""
    return _Normal(std)


def uniform(bound: float) -> Init:
    """Uniform in -bound .. bound."""
    return _Uniform(bound)


def constant(value: float) -> Init:
    """The same number everywhere."""
    return _Constant(value)


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        whole.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class _Uniform:
    bound: float

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        whole.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, whole: Tensor, _: torch.Generator) -> None:
        whole.fill_(self.value)


def _all_axes(axes: Axes, others: Sequence[tuple[int, Axes]]) -> Axes:
    return axes + tuple(itertools.chain.from_iterable(each for _, each in others))
