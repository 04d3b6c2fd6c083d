"""Arguments of a step on this rank, split into microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_private import tree_leaves
from .local_stage import as_arguments
from .microbatches import Microbatches, Split, first_rows, rows_of, split, split_rows

Weight = Callable[[Any], float | Tensor]
"""Function from a microbatch's target to the weight of its loss, such as the number of tokens in the loss."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Batch, split into microbatches.

    Args:
        inputs: Positional arguments of the first stage, by microbatch; empty on ranks without inputs.
        kwargs: Keyword arguments for every stage of this rank, by microbatch.
        targets: Targets of the loss, by microbatch; empty without targets.
        rows: Number of rows of each microbatch; None if this rank cannot infer it.
    """

    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)


def make_feed(inputs: tuple[Any, ...], kwargs: dict[str, Any], target: Any, microbatches: int, how: Split) -> Feed:
    """Split the arguments of a step into microbatches.

    Args:
        inputs: Positional arguments of the step; empty on ranks without inputs.
        kwargs: Keyword arguments of the step.
        target: Target of the loss; None for a loss without a target.
        microbatches: Number of microbatches of the schedule.
        how: Function that splits.

    Raises:
        ValueError: An argument cannot be split into that many microbatches, or splits into other numbers of rows.
    """
    # Only some arguments may contain tensors with rows, but all must be split by the same number of rows.
    if how is split_rows:
        how = partial(split_rows, rows=first_rows((inputs, kwargs, target)))
    args: list[tuple[Any, ...]] = []
    if len(inputs) == 1 and isinstance(inputs[0], Microbatches):
        args = [as_arguments(item) for item in split(inputs[0], microbatches, how)]
    elif inputs:
        args = split(inputs, microbatches, how)
    targets = [] if target is None else split(target, microbatches, how)
    target_rows = [rows_of(part) for part in targets]
    rows = [rows_of(part) for part in args]
    if kwargs and isinstance(how, partial):  # a caller's own function may give keywords whole
        check_keywords(kwargs, rows or target_rows)
    keywords = split(kwargs, microbatches, how) if kwargs else [{}] * microbatches
    # A rank without inputs infers the rows of its microbatches from its keyword arguments.
    if not args:
        rows = [rows_of(part) for part in keywords] if kwargs else [None] * microbatches
    # The caller has split `Microbatches` on purpose, perhaps into other rows, such as packed sequences.
    if args and not isinstance(target, Microbatches):
        for number, (of_inputs, of_target) in enumerate(zip(rows, target_rows, strict=bool(targets))):
            if of_inputs not in (None, of_target) and (of_target is not None or isinstance(target, Tensor)):
                raise ValueError(
                    f"microbatch {number} has {of_inputs} rows of inputs, but {of_target} of the target; give inputs "
                    "and target of one batch"
                )
    if target_rows and rows:
        rows = [
            of_inputs if of_target is None else of_target
            for of_inputs, of_target in zip(rows, target_rows, strict=True)
        ]
    return Feed(inputs=args, kwargs=keywords, targets=targets, rows=rows or target_rows)


def check_keywords(kwargs: dict[str, Any], rows: Sequence[int | None]) -> None:
    """Check that the tensors in keyword arguments have the rows of the batch, because they are split along dim 0.

    A tensor of coefficients, for example, has no rows: a part of it in each microbatch would change the result.

    Args:
        kwargs: Keyword arguments of a step. `Microbatches` in them are already split.
        rows: Number of rows of the inputs, or else of the target, by microbatch.

    Raises:
        ValueError: A tensor has another number of rows.
    """
    if not rows or None in rows:
        return
    count = sum(each or 0 for each in rows)
    for name, value in kwargs.items():
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor) or not leaf.dim():
                continue
            sizes = [len(leaf) // len(rows) + (number < len(leaf) % len(rows)) for number in range(len(rows))]
            if sizes != list(rows):
                raise ValueError(
                    f"{name}={tuple(leaf.shape)}: a keyword is split among the microbatches by its rows, and the batch "
                    f"has {count} in microbatches of {list(rows)}; pass Microbatches([{name}] * {len(rows)}) to give "
                    "it whole to each, or a tensor of as many rows"
                )


def shares(
    feed: Feed, weight: Weight | None, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> list[float]:
    """Return a factor for each microbatch's loss, such that the sum of the losses is the mean loss of the batch.

    By default, a microbatch is weighted by its number of rows, so that means over rows become the mean over the batch.
    If this rank cannot infer the rows, all microbatches have equal weights.

    Args:
        feed: Batch on the rank with the last stage.
        weight: Weight of a microbatch, from its target. Default: its number of rows.
        group: Ranks over which gradients are averaged. The weights are summed over these ranks (all-reduce of one
            number), so that the averaged gradient equals one device's gradient of all batches. None: no sum.
        device: Device of the group's collectives. Default: "cpu".
    """
    if weight is not None:
        weights = [float(weight(target)) for target in feed.targets]
    else:
        weights = [1.0 if rows is None else float(rows) for rows in feed.rows]
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if group is not None:
        summed = total.to(device)
        dist.all_reduce(summed, group=group)
        # Data-parallel ranks average their gradients. Dividing by the mean weight instead of the sum cancels that
        # average.
        total = summed.cpu() / dist.get_world_size(group)
    return (torch.tensor(weights, dtype=torch.float64) / total).tolist()
