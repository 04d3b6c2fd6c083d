"""The claims of ranks, which list the tensors that each rank holds, and their merge into the tensors of a checkpoint.

This is pure arithmetic. The key of a tensor consists of its section and its name: "model:embed.weight". A rank holds
boxes of a tensor, which are rectangles of the global tensor. Ranks that hold the same box are replicas.
"""

import itertools
import json
import math
import operator
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, cast

import torch

from par_groups import Sharding

from ..format.bytes import bytes_of

Shape = tuple[int, ...]
Tensors = tuple[tuple[str, torch.dtype, Shape], ...]

_AGAIN = "\0again "
_CELLS = 1 << 20  # number of grid cells that are checked at once; a finer grid is checked slab by slab
_UNITED = 1 << 13  # number of boxes, counted once per holder, that are merged at once


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """This rank's elements of one tensor in the checkpoint. A save reads them, and a load fills them.

    Args:
        key: Section and name, such as "model:embed.weight" or "optimizer:embed.weight.exp_avg".
        dtype: The dtype on disk.
        sharding: The global shape, and the boxes of `local` that hold parts of it.
        local: The local tensor, on any device. With a cast, its dtype differs from the dtype on disk.
        steady: The trainer's tensor if only optimizer steps change it; else None.
        may_differ: Whether the replicas may differ. The replica of the first rank is then saved.
    """

    key: str
    dtype: torch.dtype
    sharding: Sharding
    local: torch.Tensor
    steady: torch.Tensor | None = None
    may_differ: bool = False

    @property
    def name(self) -> str:
        """The tensor's name in the files."""
        return name_of(self.key)


def key_of(section: str, name: str) -> str:
    """Return the key of a tensor with a section and a name."""
    return f"{section}:{name}"


def section_of(key: str) -> str:
    """Return the section in a key: "model" or "optimizer"."""
    return key.partition(":")[0]


def name_of(key: str) -> str:
    """Return the tensor's name in a key."""
    return key.partition(":")[2].partition(_AGAIN)[0]


def with_unique_keys(entries: Iterable[LocalTensor]) -> Iterator[LocalTensor]:
    """Yield the entries with unique keys, even if several entries are filled from one tensor in the files.

    For example, the files may tie a model's head to its embedding while the model in memory does not.
    """
    # Ranks with the same key send each other the boxes that they have loaded. A rank that casts has a key of its own,
    # because a replica of another dtype must not receive its rounded values.
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        count, dtype = seen[entry.key], entry.local.dtype
        kind = f"{count}" if dtype == entry.dtype else f"{count} as {dtype}"
        yield entry if kind == "1" else replace(entry, key=f"{entry.key}{_AGAIN}{kind}")


@dataclass(frozen=True, eq=False)
class ClaimTable:
    """Key, dtype and global shape of another rank's tensors, which each iteration decodes again.

    Args:
        data: Bytes from `Claims.table`.
    """

    data: bytes

    def decoded(self) -> dict[str, Any]:
        """Return the table that `Claims.table` has encoded."""
        return cast("dict[str, Any]", json.loads(zlib.decompress(self.data)))

    def __iter__(self) -> Iterator[tuple[str, torch.dtype, Shape]]:
        table = self.decoded()
        kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in table["kinds"]]
        return ((key, *kinds[kind]) for key, kind in zip(table["keys"], table["kind"], strict=True))


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Tensors of one rank, or of several ranks that hold the same boxes.

    Layers are usually sharded identically. So one row describes a box of many tensors, at evenly spaced places in a
    list that is sorted by shape. A rank of 4,096 describes a model with thousands of tensors in a few dozen rows.

    Args:
        tensors: Key, dtype and global shape of each tensor.
        rows: One int64 tensor (rows, 3 + 2 d) for each number of dims d. A row contains the place of the first tensor
            (see `by_shape`), the step to the next tensor, the number of tensors, and the start and size of their box.
        may_differ: Keys of the tensors whose replicas may differ.
    """

    tensors: Tensors | ClaimTable
    rows: dict[int, torch.Tensor]
    may_differ: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[LocalTensor]) -> "Claims":
        """Return the claims of a rank with these entries."""
        tensors: list[tuple[str, torch.dtype, Shape]] = []
        boxes: list[tuple[int, Shape, Shape]] = []
        may_differ = []
        for number, entry in enumerate(entries):
            if entry.may_differ:
                may_differ.append(entry.key)
            tensors.append((entry.key, entry.dtype, tuple(entry.sharding.shape)))
            boxes.extend((number, tuple(box.start), tuple(box.size)) for box in entry.sharding.boxes)
        return cls.of_boxes(tuple(tensors), boxes, tuple(may_differ))

    @classmethod
    def of_boxes(
        cls, tensors: Tensors, boxes: Iterable[tuple[int, Shape, Shape]], may_differ: tuple[str, ...] = ()
    ) -> "Claims":
        """Return the claims of a rank that holds these boxes.

        Args:
            tensors: Key, dtype and global shape of each tensor.
            boxes: Index in `tensors`, start and size of each box.
            may_differ: Keys of the tensors whose replicas may differ; default none.
        """
        # Sorting by shape makes tensors with the same sharding neighbours, so that a few progressions describe
        # thousands of boxes.
        places = dict(zip(by_shape(tensors), range(len(tensors)), strict=True))
        alike: dict[tuple[Shape, Shape], list[int]] = {}
        for number, start, size in boxes:
            alike.setdefault((start, size), []).append(places[number])
        rows: dict[int, list[list[int]]] = {}
        for (start, size), found in alike.items():
            of_dims = rows.setdefault(len(start), [])
            of_dims.extend([*progression, *start, *size] for progression in _progressions(sorted(found)))
        as_tensors = {dims: torch.tensor(found, dtype=torch.int64, device="cpu") for dims, found in rows.items()}
        return cls(tensors=tensors, rows=as_tensors, may_differ=may_differ)

    def table(self) -> bytes:
        """Return the tensors as bytes, which are equal for equal tensors."""
        # Most ranks have the same table, so only one rank of each kind sends it.
        # Models repeat few dtypes and shapes, so each tensor refers to a kind by number.
        kinds = Counter((str(dtype).partition(".")[2], shape) for _, dtype, shape in self.tensors)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        table = {
            "keys": [key for key, _, _ in self.tensors],
            "kinds": list(kinds),
            "kind": [numbers[str(dtype).partition(".")[2], shape] for _, dtype, shape in self.tensors],
            "may_differ": self.may_differ,
        }
        return zlib.compress(json.dumps(table).encode(), 1)

    def boxes(self) -> bytes:
        """Return the rows as bytes, which are equal for equal rows."""
        rows = sorted(self.rows.items())
        head = torch.tensor([len(rows)] + [n for dims, found in rows for n in (dims, len(found))], device="cpu")
        return zlib.compress(b"".join(bytes_of(part.contiguous()) for part in (head, *(found for _, found in rows))), 1)

    def with_boxes(self, boxes: bytes) -> "Claims":
        """Return the claims of a rank with these tensors and with the rows in bytes from `boxes`."""
        raw = torch.frombuffer(bytearray(zlib.decompress(boxes)), dtype=torch.int64)
        count = int(raw[0])
        at, rows = 1 + 2 * count, {}
        for dims, length in raw[1:at].view(count, 2).tolist():
            size = length * (3 + 2 * dims)
            rows[dims] = raw[at : at + size].view(length, -1)
            at += size
        return replace(self, rows=rows)

    @classmethod
    def decode_table(cls, data: bytes) -> "Claims":
        """Return claims without boxes of the tensors in bytes from `table`."""
        table = ClaimTable(data)
        return cls(tensors=table, rows={}, may_differ=tuple(table.decoded()["may_differ"]))


def by_shape(tensors: Iterable[tuple[str, torch.dtype, Shape]]) -> list[int]:
    """Return the numbers of tensors, sorted by shape and then by slot of the optimizer."""
    shapes: dict[Shape, int] = {}
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, (key, _, shape) in enumerate(tensors):
        kinds.setdefault((shapes.setdefault(shape, number), key.rpartition(".")[2]), []).append(number)
    return [number for _, numbers in sorted(kinds.items()) for number in numbers]


def _progressions(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield ascending numbers as evenly spaced progressions: first number, step and count."""
    begin = 0
    while begin < len(numbers):
        end = begin + 1
        step = numbers[end] - numbers[begin] if end < len(numbers) else 1
        # Layers of a model give evenly spaced numbers: a progression replaces one row per layer.
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        yield numbers[begin], step, end - begin
        begin = end


@dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """The distinct boxes of a tensor, or of many identically sharded tensors, and the ranks that hold each box.

    Args:
        starts: int64 (boxes, dims), sorted by the first element in row-major order.
        sizes: int64 (boxes, dims).
        ranks: int64, the holders of all boxes, box by box.
        first: int64 (boxes + 1), offset in `ranks` of each box's first holder, and the total number of holders.
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    ranks: torch.Tensor
    first: torch.Tensor

    @cached_property
    def all_holders(self) -> int:
        """Ranks that hold a box, as an integer whose byte r is 1 if rank r holds one."""
        holds = torch.zeros(int(self.ranks.max()) + 1 if len(self.ranks) else 0, dtype=torch.uint8, device="cpu")
        holds[self.ranks] = 1
        return int.from_bytes(bytes_of(holds), "little")

    def holders(self, box: int) -> torch.Tensor:
        """Return the ranks that hold a box, ascending."""
        return self.ranks[self.first[box] : self.first[box + 1]]

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """Tensor of the checkpoint, and the boxes of it that ranks hold.

    Args:
        key: Section and name.
        dtype: The dtype on disk.
        shape: The global shape.
        boxes: Boxes; identically sharded tensors share them.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    boxes: Boxes

    @property
    def name(self) -> str:
        """The tensor's name in the files."""
        return name_of(self.key)

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor on disk."""
        return self.dtype.itemsize * math.prod(self.shape)


def merge(claims: Sequence[tuple[Sequence[int], Claims]]) -> list[GlobalTensor]:
    """Merge all claims into the tensors of the checkpoint, in the order in which they first appear.

    Args:
        claims: Ranks, and the claims of these ranks.

    Raises:
        ValueError: Two ranks claim one name with different dtypes or shapes.
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
                    f"{name_of(key)!r} is {first_dtype} {first_shape} on rank {said_by[number]}, but {dtype} {shape} "
                    f"on rank {ranks[0]}; a local tensor that is a part of a larger one needs a record: "
                    "layout={name: Sharding(...)}"
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
        order = which.argsort(stable=True)
        of_table, first, step, length = statements.unbind(1)
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
    for column in range(rows.shape[1] - 1, -1, -1):
        order = order[rows[order, column].argsort(stable=True)]
    ordered = rows[order]
    is_new = torch.ones(len(rows), dtype=torch.bool, device="cpu")
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    which = torch.empty_like(order)
    which[order] = is_new.cumsum(0) - 1
    return ordered[is_new], which


def check_covered(tensors: Iterable[GlobalTensor]) -> None:
    """Check that some rank holds every element of every tensor.

    Raises:
        ValueError: A tensor has gaps. The message names such tensors.
    """
    covered: dict[tuple[Shape, int], bool] = {}  # layers of one shape usually share their boxes, and one check suffices
    gaps = []
    for tensor in tensors:
        boxes = tensor.boxes
        geometry = tensor.shape, id(boxes)
        if geometry not in covered:
            covered[geometry] = is_covered(tensor.shape, boxes.starts, boxes.sizes)
        if not covered[geometry]:
            gaps.append(tensor)
    if gaps:
        named = ", ".join(f"{gap.name!r} {gap.shape} ({int(gap.boxes.sizes.prod(1).sum())} held)" for gap in gaps[:5])
        raise ValueError(
            f"no rank of the group holds some elements of {named}{' and others' if len(gaps) > 5 else ''}; pass the "
            "group of all ranks that hold the model, or correct the records or `layout`"
        )


def is_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Return whether the boxes, of which there may be thousands, cover every element of a tensor.

    Args:
        shape: The tensor's shape.
        starts: int64 (boxes, dims).
        sizes: int64 (boxes, dims).
    """
    numel = math.prod(shape)
    if numel == 0:
        return True
    # Fewer elements than the tensor has cannot cover it, which answers most faulty cases at once.
    if len(starts) == 0 or int(sizes.prod(1).sum()) < numel:
        return False
    if len(shape) == 0:
        return True
    strides = torch.tensor(row_major(shape), device="cpu")
    first = (starts * strides).sum(1)
    last = ((starts + sizes - 1) * strides).sum(1)
    # A box is contiguous in row-major order if the distance of its ends equals its number of elements.
    if not bool((last - first + 1 == sizes.prod(1)).all()):
        return _is_grid_covered(shape, starts, sizes)
    # Each box is one run of elements. Sorted by their first element, the runs cover the tensor if no gap is between
    # two.
    order = first.argsort()
    first, reached = first[order], last[order].cummax(0).values
    return int(first[0]) == 0 and int(reached[-1]) == numel - 1 and bool((first[1:] <= reached[:-1] + 1).all())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a given shape, in elements."""
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return tuple(reversed(steps[:-1]))


def _is_grid_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Return whether boxes of any form cover a tensor: some box must contain each cell of the grid of their edges."""
    stops = starts + sizes
    ends = torch.tensor([(0, n) for n in shape], device="cpu")
    edges = [torch.cat([starts[:, d], stops[:, d], ends[d]]).unique() for d in range(len(shape))]
    cells = [len(edge) - 1 for edge in edges]
    if math.prod(cells) > _CELLS and len(shape) > 1:
        for edge in edges[0][:-1].tolist():  # within a slab of the first dim, the other dims decide
            inside = (starts[:, 0] <= edge) & (stops[:, 0] > edge)
            if not is_covered(shape[1:], starts[inside, 1:], sizes[inside, 1:]):
                return False
        return True
    low = [torch.searchsorted(edge, starts[:, d].contiguous()) for d, edge in enumerate(edges)]
    high = [torch.searchsorted(edge, stops[:, d].contiguous()) for d, edge in enumerate(edges)]
    count = torch.zeros([n + 1 for n in cells], dtype=torch.int32, device="cpu")
    # Each box adds +1 and -1 at its corners. The cumulative sum along every dim then counts the boxes over each cell,
    # without a loop over the boxes.
    for corner in itertools.product((0, 1), repeat=len(shape)):
        index = tuple(high[d] if end else low[d] for d, end in enumerate(corner))
        sign = torch.full((len(starts),), (-1) ** sum(corner), dtype=torch.int32, device="cpu")
        count.index_put_(index, sign, accumulate=True)
    for d in range(len(shape)):
        count = count.cumsum(d)
    return bool((count[tuple(slice(n) for n in cells)] > 0).all())
