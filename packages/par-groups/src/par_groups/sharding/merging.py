"""Merge of the claims of all ranks into global tensors.

Thousands of ranks may hold thousands of tensors each, so the work is done with tensor operations on all rows at once.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import torch

from .._bytes import bytes_of
from .held import Boxes, Claims, GlobalTensor, by_shape

if TYPE_CHECKING:
    from .sharding import Shape

_UNITED = 1 << 13  # number of boxes, counted once per holder, that are merged at once


def merge_claims(claims: Sequence[tuple[Sequence[int], Claims]]) -> list[GlobalTensor]:
    """Merge the claims of all ranks into global tensors, in the order in which they first appear.

    Args:
        claims: Ranks, and the claims of these ranks.

    Raises:
        ValueError: Two ranks claim one key with different dtypes or shapes.
    """
    # The work is done per row and not per box of a tensor, so identically sharded tensors are merged only once.
    known: dict[str, int] = {}  # number of each tensor, by key
    kinds: list[tuple[torch.dtype, Shape]] = []  # dtype and shape of each tensor, by number
    equal: dict[tuple[torch.dtype, Shape], tuple[torch.dtype, Shape]] = {}  # one object for each kind, to save memory
    said_by = array("q")  # the first rank that claims each tensor, by number
    tables: dict[int, int] = {}  # number of each table of tensors, by its identity; most ranks share a table
    numbers: list[torch.Tensor] = []  # global numbers of each table's tensors, by place
    for ranks, claim in claims:
        if id(claim.tensors) in tables:
            continue
        tables[id(claim.tensors)] = len(numbers)
        told = tuple(claim.tensors)
        for key, dtype, shape in told:
            number = known.setdefault(key, len(kinds))
            if number == len(kinds):
                kinds.append(equal.setdefault((dtype, shape), (dtype, shape)))
                said_by.append(ranks[0])
            elif kinds[number] != (dtype, shape):
                first_dtype, first_shape = kinds[number]
                raise ValueError(
                    f"{key!r} is {first_dtype} {first_shape} on rank {said_by[number]}, but {dtype} {shape} "
                    f"on rank {ranks[0]}; if the local tensor is a part of a larger one, use "
                    "par_groups.set_sharding(tensor, Sharding(...)), or pass layout={name: Sharding(...)}"
                )
        # Rows refer to tensors by their place in this order, which a rank and the merge compute identically.
        own = [known[told[number][0]] for number in by_shape(told)]
        numbers.append(torch.tensor(own, dtype=torch.int64, device="cpu"))

    may_differ = {known[key] for _, claim in claims for key in claim.may_differ}
    by_dims: dict[int, list[int]] = {}
    for number, (_, shape) in enumerate(kinds):
        by_dims.setdefault(len(shape), []).append(number)
    keys = list(known)
    merged: list[GlobalTensor | None] = [None] * len(keys)
    for dims, of_dims in by_dims.items():
        said = _Said.of(claims, tables, numbers, dims)
        alike = said.alike(of_dims, may_differ)
        for boxes, same in zip(_united(said, list(alike)), alike.values(), strict=True):
            for number in same:
                dtype, shape = kinds[number]
                merged[number] = GlobalTensor(key=keys[number], dtype=dtype, shape=shape, boxes=boxes)
    return cast("list[GlobalTensor]", merged)


@dataclass(frozen=True)
class _Holders:
    """The ranks of several claims in one int64 tensor, and the offset and number of each claim's ranks."""

    ranks: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor

    @classmethod
    def of(cls, ranks: Sequence[Sequence[int]]) -> "_Holders":
        """Concatenate the ranks of several claims."""
        count = torch.tensor([len(some) for some in ranks], dtype=torch.int64, device="cpu")
        flat = torch.tensor([rank for some in ranks for rank in some], dtype=torch.int64, device="cpu")
        return cls(flat, count.cumsum(0) - count, count)


_Alike = tuple[tuple[int, ...], bool]
"""Statements about a tensor, and whether its replicas may differ. Tensors with the same value have the same boxes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Said:
    """The contents of all claims about the tensors with a given number of dims, as a list of statements.

    A statement describes the boxes of several identically sharded tensors. A box is a rectangular part of a tensor.

    Args:
        rows: int64 (rows, 2 * dims), start and size of each box, one statement after the other.
        sources: int64 (rows), index in `holders` of the ranks that hold each box.
        first: int64 (statements + 1), offset in `rows` of each statement, and the total number of rows.
        tensors: int64, global numbers of each statement's tensors, one statement after the other.
        lengths: int64 (statements), number of tensors of each statement.
        holders: The ranks of all claims.
    """

    rows: torch.Tensor
    sources: torch.Tensor
    first: torch.Tensor
    tensors: torch.Tensor
    lengths: torch.Tensor
    holders: _Holders

    @classmethod
    def of(
        cls,
        claims: Sequence[tuple[Sequence[int], Claims]],
        tables: dict[int, int],
        numbers: Sequence[torch.Tensor],
        dims: int,
    ) -> "_Said":
        """Collect the statements about the tensors with `dims` dims.

        Args:
            claims: Ranks, and the claims of these ranks.
            tables: Number of each table of tensors, by its identity.
            numbers: Global numbers of each table's tensors, by place.
            dims: Number of dims.
        """
        # Ranks whose claims differ may still have equal rows for this number of dims. These rows are kept once.
        alike: dict[tuple[int, bytes], tuple[torch.Tensor, list[int]]] = {}
        for ranks, claim in claims:
            if dims in claim.rows:
                said = claim.rows[dims].contiguous()
                same = tables[id(claim.tensors)], sha256(bytes_of(said)).digest()
                alike.setdefault(same, (said, []))[1].extend(ranks)
        none = torch.empty(0, 3 + 2 * dims, dtype=torch.int64, device="cpu")
        rows = torch.cat([none, *(said for said, _ in alike.values())])
        counts = torch.tensor([len(said) for said, _ in alike.values()], dtype=torch.int64, device="cpu")
        sources = torch.arange(len(alike), device="cpu").repeat_interleave(counts)
        table = torch.tensor([number for number, _ in alike], dtype=torch.int64, device="cpu").repeat_interleave(counts)
        statements, which = _unique(torch.cat([table[:, None], rows[:, :3]], 1))
        # Rows of one statement follow each other in this order.
        order = which.argsort(stable=True)
        of_table, first, step, length = statements.unbind(1)
        # A statement's k-th tensor is in its table at the place first + k * step; all tables follow each other in
        # `numbers`.
        place = _ranges(torch.zeros_like(length), length)  # within each statement
        starts = _begins(torch.tensor([len(each) for each in numbers], dtype=torch.int64, device="cpu"))
        at = (starts[of_table] + first).repeat_interleave(length) + place * step.repeat_interleave(length)
        return cls(
            rows=rows[order, 3:],
            sources=sources[order],
            first=_begins(which.bincount(minlength=len(statements))),
            tensors=torch.cat(list(numbers))[at] if len(at) else at,
            lengths=length,
            holders=_Holders.of([ranks for _, ranks in alike.values()]),
        )

    def alike(self, tensors: Sequence[int], may_differ: set[int]) -> dict[_Alike, list[int]]:
        """Group the tensors that the same statements describe.

        Args:
            tensors: Numbers of all tensors with this number of dims, including tensors without elements.
            may_differ: Numbers of the tensors whose replicas may differ.
        """
        order = self.tensors.argsort(stable=True)
        statements = torch.arange(len(self.lengths), device="cpu").repeat_interleave(self.lengths)[order].tolist()
        first = array("q", _begins(self.tensors.bincount(minlength=max(tensors) + 1)).tolist())
        found: dict[_Alike, list[int]] = {}
        for number in tensors:
            same = tuple(statements[first[number] : first[number + 1]]), number in may_differ
            found.setdefault(same, []).append(number)
        return found


def _united(said: _Said, alike: Sequence[_Alike]) -> Iterator[Boxes]:
    """Yield the distinct boxes and their holders for each kind of tensor. Equal results are the same object."""
    lengths = said.first.diff()
    # Kinds are merged in batches: a batch saves tensor operations, and its size bounds the memory.
    sizes = _begins(said.holders.count[said.sources])[said.first].diff().tolist()
    equal: dict[bytes, Boxes] = {}
    begin = 0
    while begin < len(alike):
        end, size = begin, 0
        while end < len(alike) and (end == begin or size < _UNITED):
            size += sum(sizes[statement] for statement in alike[end][0])
            end += 1
        of_kinds = [torch.tensor(statements, dtype=torch.int64, device="cpu") for statements, _ in alike[begin:end]]
        each = torch.tensor([len(statements) for statements in of_kinds], device="cpu")
        kinds, statements = torch.arange(end - begin, device="cpu").repeat_interleave(each), torch.cat(of_kinds)
        count = lengths[statements]
        rows = _ranges(said.first[statements], count)
        only_first = torch.tensor([differ for _, differ in alike[begin:end]], device="cpu")
        yield from _united_at_once(said, kinds.repeat_interleave(count), rows, only_first, equal)
        begin = end


def _united_at_once(
    said: _Said, kinds: torch.Tensor, rows: torch.Tensor, only_first: torch.Tensor, equal: dict[bytes, Boxes]
) -> Iterator[Boxes]:
    """Yield the boxes of each kind of tensor.

    Args:
        said: Statements about all of these tensors.
        kinds: int64 (rows), kind of tensor that each row describes, ascending.
        rows: int64 (rows), numbers of the rows in `said`.
        only_first: bool (kinds), whether only the first holder of a box counts because the replicas may differ.
        equal: Boxes by content, to which new boxes are added.
    """
    dims = said.rows.shape[1] // 2
    unique, which = _unique(torch.cat([kinds[:, None], said.rows[rows]], 1))
    sources = said.sources[rows]
    count = said.holders.count[sources]
    ranks = said.holders.ranks[_ranges(said.holders.first[sources], count)]
    # A rank has a box twice where two tensors of its optimizer hold parts of one parameter, and count steps each.
    # Box and rank are packed into one integer, so that `unique` on a vector removes duplicates and sorts both at once.
    stride = int(ranks.max()) + 1 if len(ranks) else 1
    pairs = (which.repeat_interleave(count) * stride + ranks).unique()
    box, rank = pairs // stride, pairs % stride
    if len(box) and bool(only_first.any()):
        # If replicas may differ, only the first holder counts: the others must neither send nor compare.
        is_counted = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), box[1:] != box[:-1]])
        is_counted |= ~only_first[unique[box, 0]]
        box, rank = box[is_counted], rank[is_counted]
    corners = unique[:, 1:].contiguous()
    holders = _begins(box.bincount(minlength=len(unique)))
    begins = _begins(unique[:, 0].bincount(minlength=len(only_first))).tolist()
    for low, high in itertools.pairwise(begins):
        first = holders[low : high + 1] - holders[low]
        of_kind = corners[low:high], rank[int(holders[low]) : int(holders[high])], first
        content = b"|".join(bytes(bytes_of(field.contiguous())) for field in of_kind)
        if content not in equal:
            starts, sizes = of_kind[0].clone().split(dims, 1) if dims else (of_kind[0], of_kind[0])
            # The clone drops the reference to the batch's tensors, which would otherwise stay in memory with every box.
            equal[content] = Boxes(starts=starts, sizes=sizes, ranks=of_kind[1].clone(), first=first)
        yield equal[content]


def _begins(counts: torch.Tensor) -> torch.Tensor:
    """Return int64 (n + 1), the offsets of n consecutive parts and the end of the last part."""
    begins = torch.zeros(len(counts) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=begins[1:])
    return begins


def _ranges(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the concatenation of the ranges first .. first + count - 1."""
    begin = first - (count.cumsum(0) - count)  # first number of each range, minus its offset in the result
    return begin.repeat_interleave(count) + torch.arange(int(count.sum()), device="cpu")


def _unique(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct rows in lexicographic order, and the index of each given row among them."""
    # `torch.unique(dim=0)` would create a tensor object for every row.
    order = torch.arange(len(rows), device="cpu")
    # Stable sorts from the last column to the first give the lexicographic order.
    for column in range(rows.shape[1] - 1, -1, -1):
        order = order[rows[order, column].argsort(stable=True)]
    ordered = rows[order]
    is_new = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    which = torch.empty_like(order)
    which[order] = is_new.cumsum(0) - 1
    return ordered[is_new], which
