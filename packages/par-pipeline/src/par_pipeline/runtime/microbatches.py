"""A batch as microbatches, and what each weighs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._structure import tensors_of

Split = Callable[[Any, int], Sequence[Any]]
"""Takes a batch and a number, and gives that many microbatches."""


class Microbatches(tuple[Any, ...]):
    """A batch that is split already: `step(Microbatches([x0, x1]), target=Microbatches([y0, y1]))`.

    As the only positional argument of `step`, an item that is a plain tuple is several arguments of the first stage.
    A part of a batch may be one as well: `step(x, mask=Microbatches([m0, m1]))`.
    """

    __slots__ = ()

    def __new__(cls, items: Iterable[Any]) -> "Microbatches":
        return super().__new__(cls, items)


def split_rows(batch: Any, microbatches: int) -> list[Any]:
    """Splits every tensor of a batch along dim 0, into sizes that differ by one at most, larger first.

    `Microbatches` in it are split already. Tensors without dims and other values go to every microbatch as they are.

    Raises:
        ValueError: Fewer rows than microbatches, or tensors with different numbers of rows.
        TypeError: An object that holds tensors where nobody sees them, so that they would not be split.
    """
    leaves, structure = pytree.tree_flatten(batch)
    rows = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) > 1:
        raise ValueError(f"the tensors of the batch have {sorted(rows)} rows; give equal numbers, or a `split`")
    if rows and min(rows) < microbatches:
        raise ValueError(
            f"a batch of {min(rows)} rows is smaller than the {microbatches} microbatches of the schedule; "
            "give more rows, or make a schedule of fewer microbatches"
        )
    parts = [_parts(leaf, microbatches) for leaf in leaves]
    return [pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(microbatches)]


def _parts(leaf: Any, microbatches: int) -> Sequence[Any]:
    if isinstance(leaf, Microbatches):
        return split(leaf, microbatches, split_rows)
    if isinstance(leaf, Tensor):
        return torch.tensor_split(leaf, microbatches) if leaf.dim() else [leaf] * microbatches
    if _hides_tensors(leaf):  # such as transformers' BatchEncoding
        raise TypeError(
            f"a batch has a {type(leaf).__name__}, whose tensors cannot be split; give them in a dict, a list or a "
            "tuple, or give Pipeline(..., split=...)"
        )
    return [leaf] * microbatches


def split(batch: Any, microbatches: int, how: Split) -> list[Any]:
    """The microbatches of a batch.

    Raises:
        ValueError: Not as many as the schedule has.
    """
    parts = list(batch) if isinstance(batch, Microbatches) else list(how(batch, microbatches))
    if len(parts) != microbatches:
        source = "Microbatches" if isinstance(batch, Microbatches) else "`split`"
        raise ValueError(f"{source} gave {len(parts)} microbatches, but the schedule has {microbatches}")
    return parts


def merge(parts: Sequence[Any]) -> Any:
    """One value of those of all microbatches: tensors are joined along dim 0, those without dims are stacked.

    Other values are the first microbatch's. Where structures or shapes do not fit, the parts are given as they are.
    """
    flat = [pytree.tree_flatten(part) for part in parts]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return list(parts)
    joined = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        shapes = {(each.dim(), each.shape[1:]) if isinstance(each, Tensor) else None for each in column}
        if len(shapes) > 1:
            return list(parts)
        if shapes == {None}:
            joined.append(column[0])
        else:
            joined.append(torch.cat(column) if column[0].dim() else torch.stack(column))
    return pytree.tree_unflatten(joined, structure)


def check_visible(outputs: Any) -> None:
    """Raises TypeError for an object whose tensors could not be joined with those of other microbatches."""
    for leaf in pytree.tree_leaves(outputs):
        if _hides_tensors(leaf):
            raise TypeError(
                f"the outputs have a {type(leaf).__name__}, an object with a tensor in it, which cannot be joined; "
                "return a dict, a list or a tuple, or leave return_outputs away"
            )


def _hides_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and not callable(leaf) and bool(tensors_of(getattr(leaf, "__dict__", None)))


def rows_of(value: Any) -> int | None:
    """The number of rows of a microbatch: of its first tensor with dims."""
    tensors = (value,) if isinstance(value, Tensor) else tensors_of(value)
    return next((len(each) for each in tensors if each.dim()), None)
