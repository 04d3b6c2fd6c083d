"""Holders of the boxes of global tensors: compact claims of each rank, and the ranks that hold each box.

This is pure arithmetic. `Sharding` describes one rank's boxes of one tensor; the claims of all ranks describe all
tensors of all ranks. Ranks that hold the same box are replicas.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from .._bytes import bytes_of
from .sharding import Shape, Sharding

Tensors = tuple[tuple[str, torch.dtype, Shape], ...]

Rectangle = tuple[Shape, Shape]
"""Start and size of a rectangle of a tensor."""


@dataclass(frozen=True, eq=False)
class ClaimTable:
    """Key, dtype and global shape of another rank's tensors, as the compressed bytes that the rank sent.

    Each iteration decodes the bytes again, so that the tables of many ranks take little memory.

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
    def of(cls, held: Iterable[tuple[str, torch.dtype, Sharding]], *, may_differ: tuple[str, ...] = ()) -> "Claims":
        """Return the claims of a rank.

        Args:
            held: Key, dtype and sharding of each tensor of which the rank holds boxes.
            may_differ: Keys of the tensors whose replicas may differ; default none.
        """
        tensors: list[tuple[str, torch.dtype, Shape]] = []
        boxes: list[tuple[int, Shape, Shape]] = []
        for number, (key, dtype, sharding) in enumerate(held):
            tensors.append((key, dtype, tuple(sharding.shape)))
            boxes.extend((number, tuple(box.start), tuple(box.size)) for box in sharding.boxes)
        return cls.of_boxes(tuple(tensors), boxes, may_differ)

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
        # The head has the numbers of dims and rows, by which `with_boxes` splits the flat numbers again.
        head = torch.tensor([len(rows)] + [n for dims, found in rows for n in (dims, len(found))], device="cpu")
        return zlib.compress(b"".join(bytes_of(part.contiguous()) for part in (head, *(found for _, found in rows))), 1)

    def with_boxes(self, boxes: bytes) -> "Claims":
        """Return the claims of a rank with these tensors and with the rows in bytes from `boxes`."""
        # The bytes are copied, because torch warns about a tensor over memory that it may not write.
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
    """A global tensor, and the boxes of it that ranks hold.

    Args:
        key: Unique key of the tensor.
        dtype: The dtype of its elements.
        shape: The global shape.
        boxes: Boxes; identically sharded tensors share them.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    boxes: Boxes

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


def intersect_rectangles(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Return the intersection of two rectangles of a tensor; None if they do not overlap."""
    start = tuple(map(max, one[0], other[0]))
    stops = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    size = tuple(stop - low for stop, low in zip(stops, start, strict=True))
    return (start, size) if min(size, default=1) > 0 else None


def subtract_rectangle(outer: Rectangle, inner: Rectangle) -> list[Rectangle]:
    """Return rectangles that make up `outer` without `inner`, which is a part of it.

    There are at most two for each dim.
    """
    left: list[Rectangle] = []
    start, size = list(outer[0]), list(outer[1])
    for dim, (low, length) in enumerate(zip(*inner, strict=True)):
        before, after = low - start[dim], start[dim] + size[dim] - low - length
        # On the dims before this one, the rest has already shrunk to `inner`, so that no two rectangles overlap.
        if before:
            left.append((tuple(start), (*size[:dim], before, *size[dim + 1 :])))
        if after:
            left.append(((*start[:dim], low + length, *start[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :])))
        start[dim], size[dim] = low, length
    return left
