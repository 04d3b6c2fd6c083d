"""The claims of ranks, which list the tensors that each rank holds, and the tensors of all ranks that result.

Pure arithmetic. A tensor is known by its key, its section and its name there: "model:embed.weight". What a rank has of
it are boxes, rectangles of the global tensor; several ranks that hold the same box are replicas.
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
_CELLS = 1 << 20  # of a grid that is looked at as one; a finer grid is looked at slab by slab
_UNITED = 1 << 13  # boxes, counted once for each holder, that are united at once


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """This rank's elements of one tensor in the checkpoint. A save reads them, and a load fills them.

    Args:
        key: Section and name, such as "model:embed.weight" or "optimizer:embed.weight.exp_avg".
        dtype: The dtype on disk.
        sharding: The global shape, and the boxes of `local` that hold parts of it.
        local: The local tensor, on any device; its dtype differs from the one on disk where a cast was asked for.
        steady: The trainer's tensor, if it changes in an optimizer's steps alone; else None.
        may_differ: Whether the replicas may differ, so that the one of the first rank is saved.
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
    """The key of a tensor, from its section and its name there."""
    return f"{section}:{name}"


def section_of(key: str) -> str:
    """The section in a key: "model" or "optimizer"."""
    return key.partition(":")[0]


def name_of(key: str) -> str:
    """The tensor's name in a key."""
    return key.partition(":")[2].partition(_AGAIN)[0]


def with_unique_keys(entries: Iterable[LocalTensor]) -> Iterator[LocalTensor]:
    """The entries, with other keys but the same names where several are filled from one tensor in the files.

    So it is with the head of a model that ties it to the embedding in the files and not in memory. And ranks that cast
    what they load have keys for their own dtype: a replica of another dtype must not hand on rounded values.
    """
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        count, dtype = seen[entry.key], entry.local.dtype
        kind = f"{count}" if dtype == entry.dtype else f"{count} as {dtype}"
        yield entry if kind == "1" else replace(entry, key=f"{entry.key}{_AGAIN}{kind}")


@dataclass(frozen=True, eq=False)
class ClaimTable:
    """Key, dtype and global shape of tensors, as another rank has told them; decoded each time that one goes over them.

    Args:
        data: What `Claims.table` makes of them.
    """

    data: bytes

    def decoded(self) -> dict[str, Any]:
        """What `Claims.table` made bytes of."""
        return cast("dict[str, Any]", json.loads(zlib.decompress(self.data)))

    def __iter__(self) -> Iterator[tuple[str, torch.dtype, Shape]]:
        table = self.decoded()
        kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in table["kinds"]]
        return ((key, *kinds[kind]) for key, kind in zip(table["keys"], table["kind"], strict=True))


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Tensors of one rank, or of several ranks that hold the same boxes.

    Layers are cut alike, so one row speaks of a box of many tensors, whose places are evenly spaced in a list where
    those of one shape follow each other: what a rank of 4,096 says of a model with thousands of tensors is some dozens
    of rows.

    Args:
        tensors: Key, dtype and global shape of each tensor.
        rows: By number of dims d: an int64 tensor (rows, 3 + 2 d) of the first tensor's place, see `by_shape`, the step
            from one tensor to the next, their count, and start and size of the box that the rank has of each of them.
        may_differ: Keys of those tensors whose replicas may differ.
    """

    tensors: Tensors | ClaimTable
    rows: dict[int, torch.Tensor]
    may_differ: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[LocalTensor]) -> "Claims":
        """The claims of a rank with these entries."""
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
        """The claims of a rank that has these boxes.

        Args:
            tensors: Key, dtype and global shape of each tensor.
            boxes: Number of a tensor, and start and size of a box of it.
            may_differ: Keys of those tensors whose replicas may differ.
        """
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
        """The tensors as bytes, equal for equal ones; most ranks have the same."""
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
        """The rows as bytes, equal for equal ones."""
        rows = sorted(self.rows.items())
        head = torch.tensor([len(rows)] + [n for dims, found in rows for n in (dims, len(found))], device="cpu")
        return zlib.compress(b"".join(bytes_of(part.contiguous()) for part in (head, *(found for _, found in rows))), 1)

    def with_boxes(self, boxes: bytes) -> "Claims":
        """The claims of a rank with these tensors and the rows that `boxes` made bytes of."""
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
        """The claims of a rank that has no box of the tensors that `table` made bytes of."""
        table = ClaimTable(data)
        return cls(tensors=table, rows={}, may_differ=tuple(table.decoded()["may_differ"]))


def by_shape(tensors: Iterable[tuple[str, torch.dtype, Shape]]) -> list[int]:
    """The numbers of tensors, those of one shape together, and among them those of one slot of the optimizer."""
    shapes: dict[Shape, int] = {}
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, (key, _, shape) in enumerate(tensors):
        kinds.setdefault((shapes.setdefault(shape, number), key.rpartition(".")[2]), []).append(number)
    return [number for _, numbers in sorted(kinds.items()) for number in numbers]


def _progressions(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Ascending numbers as first, step and count of evenly spaced ones."""
    begin = 0
    while begin < len(numbers):
        end = begin + 1
        step = numbers[end] - numbers[begin] if end < len(numbers) else 1
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
        first: int64 (boxes + 1), where the holders of each box begin in `ranks`, and where the last ones end.
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    ranks: torch.Tensor
    first: torch.Tensor

    @cached_property
    def all_holders(self) -> int:
        """Every rank that holds some box, as the bytes of a number: byte r is 1 if rank r does."""
        holds = torch.zeros(int(self.ranks.max()) + 1 if len(self.ranks) else 0, dtype=torch.uint8, device="cpu")
        holds[self.ranks] = 1
        return int.from_bytes(bytes_of(holds), "little")

    def holders(self, box: int) -> torch.Tensor:
        """The ranks that hold a box, ascending."""
        return self.ranks[self.first[box] : self.first[box + 1]]

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """One tensor of the checkpoint, and the boxes of it that ranks hold.

    Args:
        key: Its section and name.
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
        """Bytes of the whole tensor on disk."""
        return self.dtype.itemsize * math.prod(self.shape)


def merge(claims: Sequence[tuple[Sequence[int], Claims]]) -> list[GlobalTensor]:
    """All claims put together, tensors in the order in which they first appear.

    It looks at rows, not at boxes of tensors: those that are cut alike are united once.

    Args:
        claims: Ranks, and what each of them claims.

    Raises:
        ValueError: Ranks that give one name different dtypes or shapes.
    """
    known: dict[str, int] = {}  # by key: number
    kinds: list[tuple[torch.dtype, Shape]] = []  # by number
    equal: dict[tuple[torch.dtype, Shape], tuple[torch.dtype, Shape]] = {}  # kinds, each once
    said_by = array("q")  # by number: the rank that said so
    tables: dict[int, int] = {}  # by identity of a table of tensors, which most ranks share: its number
    numbers: list[torch.Tensor] = []  # by number of a table: the global numbers of its tensors, by place
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
    """The ranks of several claims in one int64 tensor, where those of each begin in it, and how many they are."""

    ranks: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor

    @classmethod
    def of(cls, ranks: Sequence[Sequence[int]]) -> "_Holders":
        """The ranks of each of the claims, put together."""
        count = torch.tensor([len(some) for some in ranks], dtype=torch.int64, device="cpu")
        flat = torch.tensor([rank for some in ranks for rank in some], dtype=torch.int64, device="cpu")
        return cls(flat, count.cumsum(0) - count, count)


_Alike = tuple[tuple[int, ...], bool]
"""What tensors have in common that have the same boxes: what is said of them, and whether their replicas may differ."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Said:
    """What all claims say of the tensors with some number of dims: statements, each of tensors that are cut alike.

    Args:
        rows: int64 (rows, 2 dims), start and size of a box, one statement after the other.
        sources: int64 (rows), which of the holders have each of them.
        first: int64 (statements + 1), where the rows of each begin, and where the last ones end.
        tensors: int64, the global numbers of the tensors of which each statement speaks, one after the other.
        lengths: int64 (statements), how many these are.
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
        """Puts together what is said of the tensors of so many dims.

        Args:
            claims: What is claimed.
            tables: By identity of a table of tensors: its number.
            numbers: By number of a table: the global numbers of its tensors, by place.
            dims: The number of dims.
        """
        alike: dict[tuple[int, bytes], tuple[torch.Tensor, list[int]]] = {}  # ranks may differ elsewhere
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
        """Tensors of which the same is said, by what that is: the numbers of the statements.

        Args:
            tensors: Numbers of all tensors of so many dims, also of those without elements, of which nobody speaks.
            may_differ: Numbers of those whose replicas may differ.
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
    """For each of some kinds of tensors: its different boxes and their holders; equal boxes become one with several.

    Many kinds are united at once, and what is equal in the end is the same object.
    """
    lengths = said.first.diff()
    sizes = _begins(said.holders.count[said.sources])[said.first].diff().tolist()  # of each statement, with its holders
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
    """The boxes of each kind of tensor.

    Args:
        said: Claim about all of these tensors.
        kinds: int64 (rows), of which kind of tensor each row speaks; they ascend.
        rows: int64 (rows), numbers of what is said of them.
        only_first: bool (kinds), whether the first holder of a box counts alone, as the others may have other values.
        equal: By content: boxes that there are already; gets the new ones.
    """
    dims = said.rows.shape[1] // 2
    unique, which = _unique(torch.cat([kinds[:, None], said.rows[rows]], 1))
    sources = said.sources[rows]
    count = said.holders.count[sources]
    ranks = said.holders.ranks[_ranges(said.holders.first[sources], count)]
    # A rank has a box twice where two tensors of its optimizer hold parts of one parameter, and count steps each.
    stride = int(ranks.max()) + 1 if len(ranks) else 1
    pairs = (which.repeat_interleave(count) * stride + ranks).unique()
    box, rank = pairs // stride, pairs % stride
    if len(box) and bool(only_first.any()):
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
            equal[content] = Boxes(starts=starts, sizes=sizes, ranks=of_kind[1].clone(), first=first)
        yield equal[content]


def _begins(counts: torch.Tensor) -> torch.Tensor:
    """int64 (n + 1): where each of n parts begins that follow each other, and where the last one ends."""
    begins = torch.zeros(len(counts) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=begins[1:])
    return begins


def _ranges(first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The integers from each first one on, so many of them, one range after the other."""
    begin = first - (count.cumsum(0) - count)  # of each range, less where it begins among all
    return begin.repeat_interleave(count) + torch.arange(int(count.sum()), device="cpu")


def _unique(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different rows, sorted by the first column, then by the second one and so on, and which of them each row is.

    `torch.unique` makes a tensor of every row.
    """
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
    """Checks that every element of every tensor is held by some rank.

    Raises:
        ValueError: Naming the tensors with gaps.
    """
    covered: dict[tuple[Shape, int], bool] = {}  # layers of one shape are cut alike, so most need no second look
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
    """Whether every element of a tensor lies in at least one of the boxes, of which there may be thousands.

    Args:
        shape: The tensor's shape.
        starts: int64 (boxes, dims).
        sizes: int64 (boxes, dims).
    """
    numel = math.prod(shape)
    if numel == 0:
        return True
    if len(starts) == 0 or int(sizes.prod(1).sum()) < numel:
        return False
    if len(shape) == 0:
        return True
    strides = torch.tensor(row_major(shape), device="cpu")
    first = (starts * strides).sum(1)
    last = ((starts + sizes - 1) * strides).sum(1)
    if not bool((last - first + 1 == sizes.prod(1)).all()):
        return _is_grid_covered(shape, starts, sizes)
    order = first.argsort()  # each box is one run of elements: nothing may be left between two runs
    first, reached = first[order], last[order].cummax(0).values
    return int(first[0]) == 0 and int(reached[-1]) == numel - 1 and bool((first[1:] <= reached[:-1] + 1).all())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape, in elements."""
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return tuple(reversed(steps[:-1]))


def _is_grid_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Whether boxes of any form cover a tensor: their edges make a grid, each cell of which must lie in a box."""
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
    for corner in itertools.product((0, 1), repeat=len(shape)):  # +1 where a box begins, -1 where it has ended
        index = tuple(high[d] if end else low[d] for d, end in enumerate(corner))
        sign = torch.full((len(starts),), (-1) ** sum(corner), dtype=torch.int32, device="cpu")
        count.index_put_(index, sign, accumulate=True)
    for d in range(len(shape)):
        count = count.cumsum(d)
    return bool((count[tuple(slice(n) for n in cells)] > 0).all())
