"""What the caller of a step brings on this rank, microbatch by microbatch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._microbatches import Microbatches, Split, rows_of, split
from ._stage import arguments

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
    """

    inputs: list[Arguments] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)

    def rows(self) -> list[int | None]:
        """The rows of each microbatch, as far as this rank can tell."""
        return [rows_of(each) for each in self.targets or self.inputs or self.kwargs]


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
    feed = Feed(
        inputs=given,
        kwargs=split(kwargs, microbatches, how) if kwargs else [{}] * microbatches,
        targets=[] if target is None else split(target, microbatches, how),
    )
    for number, (arg, of_target) in enumerate(zip(feed.inputs, feed.targets, strict=False)):
        if isinstance(target, Tensor) and rows_of(arg) not in (None, rows_of(of_target)):
            raise ValueError(
                f"microbatch {number} has {rows_of(arg)} rows of inputs, but {rows_of(of_target)} of the target; give "
                "inputs and target of one batch"
            )
    return feed


def shares(feed: Feed, microbatches: int, weight: Weight | None, group: dist.ProcessGroup | None) -> list[Tensor]:
    """What each microbatch's loss counts, so that their sum is the loss of the batch.

    By default a microbatch counts by its rows, so that means over rows become the mean over the batch; where this rank
    knows of no rows, all count the same.

    Args:
        feed: Of the rank with the last stage.
        microbatches: Their number.
        weight: Instead of rows.
        group: The ranks over which gradients are averaged. The weights are then summed over them (all-reduce of one
            number), so that the averaged gradient is that of one device with all batches.
    """
    if weight is not None:
        weights = [float(weight(each)) for each in feed.targets]
    else:
        rows = feed.rows() or [None] * microbatches
        weights = [1.0 if each is None else float(each) for each in rows]
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
        total /= dist.get_world_size(group)
    return [torch.tensor(each, dtype=torch.float64) / total for each in weights]
