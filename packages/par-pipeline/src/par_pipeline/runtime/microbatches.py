"""Input and output of a step: a batch, its microbatches, and the result."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._structure import tensors_of
from .._torch_private import tree_flatten, tree_leaves, tree_unflatten

Split = Callable[[Any, int], Sequence[Any]]
"""A function from a batch and a number to that many microbatches."""


class Batch(NamedTuple):
    """Batch with keyword arguments, for `forward_backward_step`.

    Attributes:
        inputs: Positional arguments of a step.
        kwargs: Keyword arguments for every stage.
        target: Target of the loss.
    """

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


class Result(NamedTuple):
    """Result of a step.

    Attributes:
        loss: Loss of the batch, a scalar, on the rank with the last stage, or on all ranks with `broadcast_loss`; else
            None.
        outputs: Outputs of the last stage for the complete batch, on its rank and with `return_outputs`; else None.
    """

    loss: Tensor | None
    outputs: Any


class Microbatches(tuple[Any, ...]):
    """A batch that is split already: `step(Microbatches([x0, x1]), target=Microbatches([y0, y1]))`.

    As the only positional argument of `step`, an item that is a plain tuple is several arguments of the first stage.
    A part of a batch may be one as well: `step(x, mask=Microbatches([m0, m1]))`.
    """

    __slots__ = ()

    def __new__(cls, items: Iterable[Any]) -> "Microbatches":
        """Take the microbatches of a step.

        Args:
            items: The microbatches, as many as the schedule has.
        """
        return super().__new__(cls, items)


def split_rows(batch: Any, microbatches: int, *, rows: int | None = None) -> list[Any]:
    """Split every tensor of a batch along dim 0, into sizes that differ by one at most, larger first.

    A value with a method `rows(start, stop)`, such as `par_layers.Tokens`, is split by this method. `Microbatches` are
    split already. Every microbatch receives tensors without dims and other values unchanged.

    Args:
        batch: Nested tensors, [rows, ...], and other values.
        microbatches: Number of microbatches.
        rows: Number of rows, used if no tensor of `batch` has rows. Default: unknown.

    Raises:
        ValueError: There are fewer rows than microbatches, tensors have different numbers of rows, or a value must be
            split by rows whose number is unknown.
        TypeError: An object hides tensors in its attributes, so that they cannot be split.
    """
    leaves, structure = tree_flatten(batch)
    numbers = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(numbers) > 1:
        raise ValueError(f"the tensors of the batch have {sorted(numbers)} rows; give equal numbers, or a `split`")
    count = numbers.pop() if numbers else rows
    if count is not None and count < microbatches:
        raise ValueError(
            f"a batch of {count} rows is smaller than the {microbatches} microbatches of the schedule; "
            "give more rows, or make a schedule of fewer microbatches"
        )
    parts = [_split_leaf(leaf, microbatches, count) for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], structure) for i in range(microbatches)]


def _split_leaf(leaf: Any, microbatches: int, rows: int | None) -> Sequence[Any]:
    if isinstance(leaf, Microbatches):
        return split(leaf, microbatches, split_rows)
    if isinstance(leaf, Tensor):
        return torch.tensor_split(leaf, microbatches) if leaf.dim() else [leaf] * microbatches
    if not isinstance(leaf, type) and callable(getattr(leaf, "rows", None)):
        if rows is None:
            raise ValueError(
                f"a batch has a {type(leaf).__name__}, which is split by its rows, but no tensor on this rank says how "
                "many there are; give the inputs or the target on this rank too, or Microbatches of it"
            )
        size, larger = divmod(rows, microbatches)  # as tensor_split has it
        # The sizes equal those of `torch.tensor_split`, so that such a value and the tensors have the same rows in each
        # microbatch.
        ends = [number * size + min(number, larger) for number in range(microbatches + 1)]
        return [leaf.rows(start, stop) for start, stop in pairwise(ends)]
    if _hides_tensors(leaf):  # such as transformers' BatchEncoding
        raise TypeError(
            f"a batch has a {type(leaf).__name__}, whose tensors cannot be split; give them in a dict, a list or a "
            "tuple, or give Pipeline(..., split=...)"
        )
    return [leaf] * microbatches


def split(batch: Any, microbatches: int, how: Split) -> list[Any]:
    """Return the microbatches of a batch, whether it is split already or not.

    Args:
        batch: `Microbatches`, or a batch for `how`.
        microbatches: Number of microbatches of the schedule.
        how: Function that splits.

    Raises:
        ValueError: There are not as many microbatches as the schedule has.
    """
    parts = list(batch) if isinstance(batch, Microbatches) else list(how(batch, microbatches))
    if len(parts) != microbatches:
        source = "Microbatches" if isinstance(batch, Microbatches) else "`split`"
        raise ValueError(f"{source} gave {len(parts)} microbatches, but the schedule has {microbatches}")
    return parts


def merge(parts: Sequence[Any]) -> Any:
    """Join the values of all microbatches: concatenate tensors along dim 0, and stack tensors without dims.

    For other values, the result has the first microbatch's value. If structures or shapes differ, the function returns
    the list of parts unchanged.
    """
    flattened = [tree_flatten(part) for part in parts]
    structure = flattened[0][1]
    # A model may return another structure for some microbatches; the caller then gets all parts instead of an error
    # after the step.
    if any(other != structure for _, other in flattened):
        return list(parts)
    joined = []
    for column in zip(*(leaves for leaves, _ in flattened), strict=True):
        shapes = {(leaf.dim(), leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in column}
        if len(shapes) > 1:
            return list(parts)
        if shapes == {None}:
            joined.append(column[0])
        else:
            joined.append(torch.cat(column) if column[0].dim() else torch.stack(column))
    return tree_unflatten(joined, structure)


def check_visible(outputs: Any) -> None:
    """Raise an error if the outputs contain an object whose tensors `merge` cannot join.

    Raises:
        TypeError: There is such an object.
    """
    for leaf in tree_leaves(outputs):
        if _hides_tensors(leaf):
            raise TypeError(
                f"the outputs have a {type(leaf).__name__}, an object with a tensor in it, which cannot be joined; "
                "return a dict, a list or a tuple, or call without return_outputs"
            )


def first_rows(batch: Any) -> int | None:
    """Return the number of rows of an unsplit batch, from its first tensor with dims; None without such a tensor."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)


def _hides_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and not callable(leaf) and bool(tensors_of(getattr(leaf, "__dict__", None)))


def rows_of(value: Any) -> int | None:
    """Return the number of rows of a microbatch, from its first tensor with dims; None without such a tensor."""
    first = value[0] if type(value) is tuple and value else value
    if isinstance(first, Tensor) and first.dim():  # as is usual, and asks for no walk through what is nested
        return first.shape[0]
    tensors = (value,) if isinstance(value, Tensor) else tensors_of(value)
    return next((len(tensor) for tensor in tensors if tensor.dim()), None)


_SHARED = ("cache_position", "logits_to_keep")
"""Keywords of transformers models that index tokens: every row has the same ones."""


def split_keywords(keywords: Mapping[str, Any], rows: int, microbatches: int) -> dict[str, Any]:
    """Split the keywords of a transformers model that have no rows along dim 0; a pipeline splits all others.

    Without this, a pipeline would split any tensor that happens to be as long as the batch has rows.

    Args:
        keywords: The keywords of a batch.
        rows: The number of rows of the batch.
        microbatches: The number of microbatches.

    Returns:
        The keywords, some of them as `Microbatches`.

    Raises:
        ValueError: A keyword has an entry for each image, so the rows to which the entries belong are unknown.
    """
    split: dict[str, Any] = dict(keywords)
    for name, value in keywords.items():
        if not isinstance(value, Tensor):
            continue
        # [sections, rows, time] of models with images; a pipeline compares dim 0 with the rows for one microbatch, too.
        if name == "position_ids" and value.dim() == 3:
            split[name] = Microbatches(value.tensor_split(microbatches, dim=1))
        elif microbatches == 1:
            continue
        elif name in _SHARED:
            split[name] = Microbatches([value] * microbatches)
        elif name.endswith("_grid_thw"):
            raise ValueError(
                f"{name} of shape {tuple(value.shape)}: it has an entry for each image, not for each of the {rows} "
                f"rows, and {microbatches} microbatches need rows; pass pipeline=dict(split=...) with a function that "
                "splits such a batch, or microbatches=1"
            )
    return split
