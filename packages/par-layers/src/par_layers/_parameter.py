"""Parameters that hold one rank's part: on the meta device with a record and an init rule, until they are filled."""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from par_groups import Box, Sharding, set_sharding, sharding_of

from ._grid import Axes, Grid

Init = Callable[[Tensor, torch.Generator], object]
"""Fills a whole parameter in place; it never sees how the parameter is cut."""


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
    _attach(parameter, Sharding(shape, tuple(boxes)), init)
    return parameter


@runtime_checkable
class _HasInit(Protocol):
    """A parameter that knows how it is filled."""

    par_init: Init


def initialize(
    model: nn.Module,
    seed: int | None,
    prefix: str = "",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fills the parameters of our layers, the same in every mode and on any number of ranks.

    Each parameter has a generator of its own, seeded by (seed, name). The whole tensor is drawn on the CPU in fp32, and
    this rank's part is kept: one parameter at a time, so that a model larger than one rank's memory can be built.
    Parameters keep their identity. (`nn.Module.to_empty` makes new ones, without a record of how they are cut.)

    Args:
        model: Holds layers of ours; other parameters are left alone.
        seed: The run's seed; None draws nothing and leaves zeros, for weights that are loaded next.
        prefix: What comes before the names, where `model` is a part of a whole such as a pipeline stage.
        device: Where to; default: the CPU.
        dtype: Of the parameters; default: fp32.

    Raises:
        ValueError: A parameter on the meta device that is not ours, and so has no rule.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, _HasInit):
            if parameter.is_meta:
                raise ValueError(f"parameter {name!r} is on the meta device and has no init rule; materialise it first")
            continue
        sharding = sharding_of(parameter)
        local = torch.zeros(parameter.shape)  # padding stays zero
        if seed is not None:
            whole = torch.empty(sharding.shape)
            parameter.par_init(whole, torch.Generator().manual_seed(_seed_of(seed, prefix + name)))
            for box in sharding.boxes:
                box.of(local).copy_(whole[box.slices])
        filled = nn.Parameter(local.to(device=device, dtype=dtype), requires_grad=parameter.requires_grad)
        _attach(filled, sharding, parameter.par_init)
        torch.utils.swap_tensors(parameter, filled)


def normal(std: float) -> Init:
    """Normal around 0."""
    return lambda whole, generator: whole.normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Init:
    """Uniform in -bound .. bound."""
    return lambda whole, generator: whole.uniform_(-bound, bound, generator=generator)


def constant(value: float) -> Init:
    """The same number everywhere."""
    return lambda whole, _: whole.fill_(value)


def _attach(parameter: nn.Parameter, sharding: Sharding, init: Init) -> None:
    set_sharding(parameter, sharding)
    parameter.par_init = init  # type: ignore[attr-defined]  # a tensor takes attributes


def _all_axes(axes: Axes, others: Sequence[tuple[int, Axes]]) -> Axes:
    return axes + tuple(itertools.chain.from_iterable(each for _, each in others))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
