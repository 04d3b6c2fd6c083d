"""A batch as microbatches, and what each weighs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ._structure import tensors_of

Split = Callable[[Any, int], Sequence[Any]]
"""Takes a batch and a number, and gives that many microbatches."""


class Microbatches(tuple[Any, ...]):
    """A batch that is split already: `step(Microbatches([x0, x1]), target=Microbatches([y0, y1]))`.

    As the only positional argument of `step`, an item that is a plain tuple is several arguments of the first stage.
    """

    __slots__ = ()

    def __new__(cls, items: Iterable[Any]) -> "Microbatches":
        return super().__new__(cls, items)


def split_rows(batch: Any, microbatches: int) -> list[Any]:
    """Splits every tensor of a batch along dim 0, into sizes that differ by one at most, larger first.

    Tensors without dims and other values go to every microbatch as they are.

    Raises:
        ValueError: Fewer rows than microbatches, or tensors with different numbers of rows.
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
    parts = [
        torch.tensor_split(leaf, microbatches) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * microbatches
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(microbatches)]


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

    Other values are the first microbatch's. Where the shapes do not fit, the parts are given as they are.
    """
    structure = pytree.tree_structure(parts[0])
    columns = list(zip(*(pytree.tree_leaves(part) for part in parts), strict=True))
    joined = []
    for column in columns:
        if not isinstance(column[0], Tensor):
            joined.append(column[0])
        elif not column[0].dim():
            joined.append(torch.stack(column))
        elif len({each.shape[1:] for each in column}) == 1:
            joined.append(torch.cat(column))
        else:
            return list(parts)
    return pytree.tree_unflatten(joined, structure)


def rows_of(value: Any) -> int | None:
    """The number of rows of a microbatch: of its first tensor with dims."""
    tensors = (value,) if isinstance(value, Tensor) else tensors_of(value)
    return next((len(each) for each in tensors if each.dim()), None)
