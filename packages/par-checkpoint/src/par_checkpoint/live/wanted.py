"""The pieces of tensors that a rank takes, and the rank that gives each piece.

This is pure arithmetic. Each rank computes only its own part: it takes what it lacks, each element once, from a rank
that holds it. A taker then requests its pieces, so that both ends use one plan.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from par_groups import Boxes, Claims, GlobalTensor, Rectangle, Sharding, intersect_rectangles, subtract_rectangle

from ..plan.claims import name_of
from ..plan.coverage import Shape
from .delta import encoded_bytes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes to which the giver may cast; a request refers to them by position."""

_GIVERS = 4  # replicas among which a taker divides its requests, so that it connects with few ranks
_FIELDS = 3  # dims in front of those of the tensor in a request: giver, dtype and copy
_GIVER = 3  # column of the giver in a row, after the first tensor, the step to the next one, and their number


class MemoryPiece(NamedTuple):
    """A rectangle of a tensor that travels from one rank to another, or stays on its rank.

    Args:
        tensor: Number of the tensor.
        start: Global index of the first element.
        size: Extent on each dim.
        dtype: Dtype of the elements on the way.
        copy: Number of the target among those of this tensor on the taker: two of its tensors may be filled from one.
        changed: Number of elements that differ from the taker's; None: all elements travel.
    """

    tensor: int
    start: Shape
    size: Shape
    dtype: torch.dtype
    copy: int
    changed: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    @property
    def bytes(self) -> int:
        """Bytes on the way."""
        width = self.dtype.itemsize
        return self.numel * width if self.changed is None else encoded_bytes(self.numel, width, self.changed)

    @property
    def is_full(self) -> bool:
        """Whether all elements travel."""
        return self.changed is None or self.bytes == self.numel * self.dtype.itemsize


class Wanted(NamedTuple):
    """A tensor that a rank fills.

    Args:
        tensor: Number of the tensor in the source.
        sharding: The boxes that the rank fills.
        dtype: Dtype of the local tensor.
        copy: Number of the target among those that are filled from this tensor.
    """

    tensor: int
    sharding: Sharding
    dtype: torch.dtype
    copy: int


class PieceRequests:
    """The pieces that one rank needs: its own pieces, and those that it requests from other ranks.

    Args:
        tensors: Tensors of the source, with the boxes that ranks hold.
        wanted: Tensors that the rank fills.
        rank: The rank.
        hosts: Number of each rank's host.

    Attributes:
        rows: Requests as `Claims` rows, with three more dims in front: giver, dtype and copy.
        local: Pieces that the rank holds itself.

    Raises:
        ValueError: No rank holds some elements; the message names the first of them.
    """

    def __init__(
        self, tensors: Sequence[GlobalTensor], wanted: Sequence[Wanted], rank: int, hosts: Sequence[int]
    ) -> None:
        self._rank, self._hosts = rank, hosts
        self._load = [0] * len(hosts)  # elements requested from each rank so far
        self.local: list[MemoryPiece] = []
        boxes: list[tuple[int, Shape, Shape]] = []
        # Layers are sharded identically, in the source as here, and one look at their boxes serves all of them.
        alike: dict[tuple[int, tuple[Rectangle, ...]], list[tuple[Rectangle, tuple[int, ...]]]] = {}
        for each in wanted:
            tensor = tensors[each.tensor]
            rectangles = tuple((tuple(box.start), tuple(box.size)) for box in each.sharding.boxes)
            key = id(tensor.boxes), rectangles
            if key not in alike:
                alike[key] = self._parts(tensor, rectangles)
            dtype = wire_dtype(tensor.dtype, each.dtype)
            code = DTYPES.index(dtype) + 1 if dtype != tensor.dtype else 0
            for (start, size), givers in alike[key]:
                # A rank that holds a part is the only giver of it.
                if givers[0] == rank:
                    self.local.append(MemoryPiece(each.tensor, start, size, dtype, each.copy))
                    continue
                giver = min(givers, key=self._load.__getitem__)
                self._load[giver] += math.prod(size)
                boxes.append((each.tensor, (giver, code, each.copy, *start), (1, 1, 1, *size)))
        self.rows = Claims.of_boxes(tuple((each.key, each.dtype, each.shape) for each in tensors), boxes).rows

    def rows_to(self, giver: int) -> dict[int, torch.Tensor]:
        """Return the rows of the request to one rank."""
        chosen = {dims: rows[rows[:, _GIVER] == giver] for dims, rows in self.rows.items()}
        return {dims: rows for dims, rows in chosen.items() if len(rows)}

    @property
    def givers(self) -> list[int]:
        """The ranks that receive a request, ascending."""
        return sorted({giver for rows in self.rows.values() for giver in rows[:, _GIVER].tolist()})

    def _parts(self, tensor: GlobalTensor, rectangles: Sequence[Rectangle]) -> list[tuple[Rectangle, tuple[int, ...]]]:
        """Cut rectangles along the boxes that ranks hold; return the parts, and the ranks that may give each part."""
        boxes, found, missing = tensor.boxes, list[tuple[Rectangle, tuple[int, ...]]](), list(rectangles)
        touched = _overlapping(boxes, rectangles)
        holders = {box: boxes.holders(box).tolist() for box in touched}
        # The rank's own boxes come first, so that nothing travels which is here already.
        for box in sorted(touched, key=lambda box: self._rank not in holders[box]):
            held = tuple(boxes.starts[box].tolist()), tuple(boxes.sizes[box].tolist())
            rest: list[Rectangle] = []
            for one in missing:
                part = intersect_rectangles(one, held)
                if part is None:
                    rest.append(one)
                    continue
                found.append((part, self._givers(holders[box])))
                rest += subtract_rectangle(one, part)
            missing = rest
            if not missing:
                break
        if missing:
            raise ValueError(
                f"no rank of the group holds {name_of(tensor.key)!r} from index {missing[0][0]} on, {missing[0][1]} "
                "elements; pass the group of all ranks that hold the source, or correct its sharding metadata"
            )
        return found

    def _givers(self, holders: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks among which this rank divides its requests for a box: itself, those of its host, or a few.

        Args:
            holders: Ranks that hold the box.
        """
        if self._rank in holders:
            return (self._rank,)
        near = [rank for rank in holders if self._hosts[rank] == self._hosts[self._rank]] or holders
        # Each taker begins at another holder. If all began at the first one, that rank would give to the whole world.
        return tuple(sorted(near, key=lambda holder: (holder - self._rank) % len(self._hosts))[:_GIVERS])


def pieces_of(
    rows: Mapping[int, torch.Tensor], tensors: Sequence[GlobalTensor], order: Sequence[int]
) -> list[MemoryPiece]:
    """Return the pieces of a request by number of the tensor, in the same order on the giver and on the taker.

    Args:
        rows: Rows of the request.
        tensors: Tensors of the source.
        order: Numbers of the tensors as `par_groups.sharding.held.by_shape` sorts them.
    """
    return sorted(_expanded(rows, tensors, order), key=lambda piece: piece.tensor)


def _expanded(
    rows: Mapping[int, torch.Tensor], tensors: Sequence[GlobalTensor], order: Sequence[int]
) -> Iterator[MemoryPiece]:
    """Yield the pieces of all rows."""
    for dims, found in sorted(rows.items()):
        for first, step, count, _, code, copy, *corners in found.tolist():
            start, size = tuple(corners[: dims - _FIELDS]), tuple(corners[dims:])
            # One row stands for the same piece of several tensors, such as those of all layers.
            for place in range(first, first + step * count, step):
                number = order[place]
                yield MemoryPiece(number, start, size, DTYPES[code - 1] if code else tensors[number].dtype, copy)


def halved(piece: MemoryPiece, limit: int) -> Iterator[MemoryPiece]:
    """Yield a piece in parts of at most `limit` elements, which are halves of halves along the first long dim."""
    if math.prod(piece.size) <= max(limit, 1):
        yield piece
        return
    # A cut along the first dim that has several indices leaves both halves contiguous if the piece is contiguous.
    dim = next(dim for dim, length in enumerate(piece.size) if length > 1)
    half, rest = piece.size[dim] // 2, piece.size[dim] - piece.size[dim] // 2
    for first, length in ((0, half), (half, rest)):
        start = (*piece.start[:dim], piece.start[dim] + first, *piece.start[dim + 1 :])
        yield from halved(piece._replace(start=start, size=(*piece.size[:dim], length, *piece.size[dim + 1 :])), limit)


def wire_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the dtype of elements on the way: the narrower one, so that the rank with the wider dtype casts."""
    # Of two dtypes of one width, neither has all values of the other. The taker's digest then needs the giver's cast.
    return target if target.itemsize <= source.itemsize and target in DTYPES else source


def _overlapping(boxes: Boxes, rectangles: Sequence[Rectangle]) -> list[int]:
    """Return the numbers of the boxes that have an element of some rectangle, ascending."""
    stops = boxes.starts + boxes.sizes
    found = torch.zeros(len(boxes), dtype=torch.bool, device="cpu")
    for start, size in rectangles:
        low = torch.tensor(start, dtype=torch.int64, device="cpu")
        high = low + torch.tensor(size, dtype=torch.int64, device="cpu")
        found |= ((boxes.starts < high) & (stops > low)).all(1)
    numbers: list[int] = found.nonzero()[:, 0].tolist()
    return numbers
