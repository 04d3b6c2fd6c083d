"""Who holds which part of which tensor: what each rank says of itself, and all of it put together."""

import hashlib
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypedDict

import torch

from ..format.bytes import bytes_of
from .coverage import is_covered
from .entry import Entry, name_of

Shape = tuple[int, ...]
Tensors = tuple[tuple[str, torch.dtype, Shape], ...]


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What one rank, or several alike, hold.

    Args:
        tensors: Key, dtype and global shape of each tensor.
        rows: By number of dims d: an int64 tensor (boxes, 1 + 2 d) of tensor number, start and size.
        may_differ: Keys of those tensors whose replicas may differ.
    """

    tensors: Tensors
    rows: dict[int, torch.Tensor]
    may_differ: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> "Claims":
        """What a rank holds."""
        tensors: list[tuple[str, torch.dtype, Shape]] = []
        rows: dict[int, list[list[int]]] = {}
        may_differ = []
        for number, entry in enumerate(entries):
            if entry.may_differ:
                may_differ.append(entry.key)
            tensors.append((entry.key, entry.dtype, tuple(entry.sharding.shape)))
            for box in entry.sharding.boxes:
                rows.setdefault(len(box.start), []).append([number, *box.start, *box.size])
        found = {dims: torch.tensor(each, device="cpu") for dims, each in rows.items()}
        return cls(tensors=tuple(tensors), rows=found, may_differ=tuple(may_differ))

    def encode(self) -> bytes:
        """As bytes, equal for equal claims."""
        head = {
            "tensors": [(key, str(dtype).partition(".")[2], shape) for key, dtype, shape in self.tensors],
            "rows": [(dims, len(each)) for dims, each in sorted(self.rows.items())],
            "may_differ": self.may_differ,
        }
        text = json.dumps(head).encode()
        body = b"".join(bytes_of(each.contiguous()) for _, each in sorted(self.rows.items()))
        return zlib.compress(len(text).to_bytes(8) + text + body, 1)

    @classmethod
    def decode(cls, data: bytes) -> "Claims":
        """`encode` undone."""
        raw = zlib.decompress(data)
        end = 8 + int.from_bytes(raw[:8])
        head = json.loads(raw[8:end])
        rows = {}
        for dims, count in head["rows"]:
            size = count * (1 + 2 * dims) * 8
            rows[dims] = torch.frombuffer(bytearray(raw[end : end + size]), dtype=torch.int64).view(count, -1)
            end += size
        tensors = tuple((key, getattr(torch, dtype), tuple(shape)) for key, dtype, shape in head["tensors"])
        return cls(tensors=tensors, rows=rows, may_differ=tuple(head["may_differ"]))


def digest(data: bytes) -> bytes:
    """What stands for a rank's claims where only equality counts."""
    return hashlib.sha256(data).digest()


class _Boxes(TypedDict):
    """All of `Held` that tensors may have in common."""

    starts: torch.Tensor
    sizes: torch.Tensor
    ranks: torch.Tensor
    first: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """One tensor and the different boxes of it that the ranks hold; several holders of one box are replicas.

    Args:
        key: The tensor.
        dtype: On disk.
        shape: Global.
        starts: int64 (boxes, dims), sorted by the first element in row-major order.
        sizes: int64 (boxes, dims).
        ranks: int64, the holders of all boxes, box by box.
        first: Where each box's holders begin in `ranks`, and one more: its end.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    starts: torch.Tensor
    sizes: torch.Tensor
    ranks: torch.Tensor
    first: tuple[int, ...]

    def holders(self, box: int) -> torch.Tensor:
        """The ranks that hold a box, ascending."""
        return self.ranks[self.first[box] : self.first[box + 1]]

    def by_first(self) -> "Held":
        """The same as if of the holders of each box there were only the first."""
        begins = torch.tensor(self.first[:-1], dtype=torch.int64, device="cpu")
        return replace(self, ranks=self.ranks[begins], first=tuple(range(len(self) + 1)))

    def __len__(self) -> int:
        return len(self.first) - 1


def merge(claims: Sequence[tuple[Sequence[int], Claims]]) -> list[Held]:
    """All claims put together, in the order in which tensors first appear.

    Args:
        claims: Ranks, and what each of them claims.

    Raises:
        ValueError: Ranks that give one name different dtypes or shapes.
    """
    known: dict[str, tuple[int, torch.dtype, Shape, int]] = {}
    numbered: dict[Tensors, torch.Tensor] = {}  # most ranks name the same tensors
    for ranks, each in claims:
        if each.tensors in numbered:
            continue
        for key, dtype, shape in each.tensors:
            _, as_dtype, as_shape, by = known.setdefault(key, (len(known), dtype, shape, ranks[0]))
            if (as_dtype, as_shape) != (dtype, shape):
                raise ValueError(
                    f"{name_of(key)!r} is {as_dtype} {as_shape} on rank {by}, but {dtype} {shape} on rank {ranks[0]}; "
                    "a local tensor that is a part of a larger one needs a record: layout={name: Sharding(...)}"
                )
        numbers = [known[key][0] for key, _, _ in each.tensors]
        numbered[each.tensors] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    boxes = _by_tensor(claims, [numbered[each.tensors] for _, each in claims])
    holders = _Holders([ranks for ranks, _ in claims])
    held = [
        Held(key=key, dtype=dtype, shape=shape, **holders.of(len(shape), *boxes.get(number, _none(len(shape)))))
        for key, (number, dtype, shape, _) in known.items()
    ]
    may_differ = {key for _, each in claims for key in each.may_differ}
    return [each.by_first() if each.key in may_differ else each for each in held]


def check_covered(every: Iterable[Held]) -> None:
    """Checks that every element of every tensor is held by somebody.

    Raises:
        ValueError: Naming the tensors with gaps.
    """
    proven: set[tuple[Shape, bytes]] = set()  # layers of one shape are cut alike, so most need no second look
    gaps = []
    for held in every:
        geometry = held.shape, bytes(bytes_of(torch.cat([held.starts, held.sizes], 1).contiguous()))
        if geometry not in proven:
            if not is_covered(held.shape, held.starts, held.sizes):
                gaps.append(held)
            proven.add(geometry)
    if gaps:
        named = ", ".join(
            f"{name_of(each.key)!r} {each.shape} ({int(each.sizes.prod(1).sum())} held)" for each in gaps[:5]
        )
        raise ValueError(
            f"no rank of the group holds some elements of {named}{' and others' if len(gaps) > 5 else ''}; pass the "
            "group of all ranks that hold the model, or correct the records or `layout`"
        )


def _by_tensor(
    claims: Sequence[tuple[Sequence[int], Claims]], numbers: Sequence[torch.Tensor]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By tensor: its boxes (n, 2 dims), and which of the claims each is from."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for dims in {dims for _, each in claims for dims in each.rows}:
        parts = [(i, each.rows[dims]) for i, (_, each) in enumerate(claims) if dims in each.rows]
        rows = torch.cat([each for _, each in parts])
        source = torch.cat([torch.full((len(each),), i, device="cpu") for i, each in parts])
        tensor = torch.cat([numbers[i][each[:, 0]] for i, each in parts])
        order = tensor.argsort(stable=True)
        which, counts = tensor[order].unique_consecutive(return_counts=True)
        split = counts.tolist()
        pieces = zip(which.tolist(), rows[order, 1:].split(split), source[order].split(split), strict=True)
        found.update((number, (boxes, sources)) for number, boxes, sources in pieces)
    return found


def _none(dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0, 2 * dims, dtype=torch.int64, device="cpu"), torch.empty(0, dtype=torch.int64, device="cpu")


class _Holders:
    """Finds equal boxes, which become one with several holders. Layers of one shape are cut alike: the work is kept.

    Args:
        ranks: Of each of the claims.
    """

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self._ranks = ranks
        self._known: dict[tuple[int, bytes, bytes], _Boxes] = {}

    def of(self, dims: int, boxes: torch.Tensor, sources: torch.Tensor) -> "_Boxes":
        """What is said of a tensor in `Held`.

        Args:
            dims: Its number of dims.
            boxes: int64 (n, 2 dims), start and size.
            sources: int64 (n), the claims they are from.
        """
        key = dims, bytes(bytes_of(boxes)), bytes(bytes_of(sources))
        if key not in self._known:
            self._known[key] = self._found(dims, boxes, sources)
        return self._known[key]

    def _found(self, dims: int, boxes: torch.Tensor, sources: torch.Tensor) -> "_Boxes":
        if len(boxes) <= 1 or dims == 0:
            unique, which = boxes[:1], torch.zeros(len(boxes), dtype=torch.int64, device="cpu")
        else:
            unique, which = boxes.unique(dim=0, return_inverse=True)  # sorted row by row: by start, first dim first
        holders: list[list[int]] = [[] for _ in range(len(unique))]
        for box, source in zip(which.tolist(), sources.tolist(), strict=True):
            holders[box].extend(self._ranks[source])
        return _Boxes(
            starts=unique[:, :dims],
            sizes=unique[:, dims:],
            ranks=torch.tensor([rank for each in holders for rank in sorted(each)], dtype=torch.int64, device="cpu"),
            first=tuple(accumulate((len(each) for each in holders), initial=0)),
        )
