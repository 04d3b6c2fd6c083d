"""What the caller of a step brings on this rank, microbatch by microbatch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .local_stage import arguments
from .microbatches import Microbatches, Split, rows_of, split

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Weight = Callable[[Any], float | Tensor]
"""What a microbatch's loss weighs, from its target: such as its number of tokens that count."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A batch, split.

    Args:
        inputs: Of the first stage, by microbatch; empty on ranks that do not run it.
        kwargs: Of every stage of this rank, by microbatch.
        targets: Of the loss, by microbatch; empty without.
        rows: Of each microbatch, as far as this rank can tell.
    """

    inputs: list[Arguments] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)


def make_feed(inputs: tuple[Any, ...], kwargs: dict[str, Any], target: Any, microbatches: int, how: Split) -> Feed:
    """Splits what was given to a step.

    Raises:
        ValueError: What cannot be split into that many microbatches, or splits into different numbers of rows.
    """
    given: list[Arguments] = []
    if len(inputs) == 1 and isinstance(inputs[0], Microbatches):
        given = [(arguments(each), {}) for each in split(inputs[0], microbatches, how)]
    elif inputs:
        given = [(each, {}) for each in split(inputs, microbatches, how)]
    named = split(kwargs, microbatches, how) if kwargs else [{}] * microbatches
    targets = [] if target is None else split(target, microbatches, how)
    rows = [rows_of(each) for each in given or named]
    of_targets = [rows_of(each) for each in targets]
    if given and isinstance(target, Tensor):
        for number, (one, other) in enumerate(zip(rows, of_targets, strict=True)):
            if one not in (None, other):
                raise ValueError(
                    f"microbatch {number} has {one} rows of inputs, but {other} of the target; give inputs and target "
                    "of one batch"
                )
    if of_targets and rows:
        rows = [other if other is not None else one for one, other in zip(rows, of_targets, strict=True)]
    return Feed(inputs=given, kwargs=named, targets=targets, rows=rows or of_targets)


def shares(
    feed: Feed, weight: Weight | None, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[float]:
    """What each microbatch's loss counts, so that their sum is the loss of the batch.

    By default a microbatch counts by its rows, so that means over rows become the mean over the batch; where this rank
    knows of no rows, all count the same.

    Args:
        feed: Of the rank with the last stage.
        weight: Instead of rows.
        group: The ranks over which gradients are averaged. The weights are then summed over them (all-reduce of one
            number), so that the averaged gradient is that of one device with all batches.
        device: That the group serves.
    """
    if weight is not None:
        weights = [float(weight(each)) for each in feed.targets]
    else:
        weights = [1.0 if each is None else float(each) for each in feed.rows]
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if group is not None:
        summed = total.to(device)
        dist.all_reduce(summed, group=group)
        total = summed.cpu() / dist.get_world_size(group)
    return (torch.tensor(weights, dtype=torch.float64) / total).tolist()
