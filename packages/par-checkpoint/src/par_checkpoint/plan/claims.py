"""What each rank says that it has, and all of it put together: every tensor, with the ranks that hold each part of it.

Pure arithmetic. A tensor is known by its key, its section and its name there: "model:embed.weight". What a rank has of
it are boxes, rectangles of the global tensor; several ranks that hold the same box are replicas.
"""

import hashlib
import itertools
import json
import math
import operator
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from par_groups import Sharding

from ..format.bytes import bytes_of

Shape = tuple[int, ...]
Tensors = tuple[tuple[str, torch.dtype, Shape], ...]

_AGAIN = "\0again "
_CELLS = 1 << 20  # of a grid that is looked at as one; a finer grid is looked at slab by slab


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What this rank has of one tensor of the checkpoint: what a save reads and a load fills.

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


def with_unique_keys(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, with other keys but the same names where several are filled from one tensor in the files.

    So it is with the head of a model that ties it to the embedding in the files and not in memory.
    """
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        count = seen[entry.key]
        yield entry if count == 1 else replace(entry, key=f"{entry.key}{_AGAIN}{count}")


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a rank has, or each of several ranks that have the same.

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
        """The claims of a rank with these entries."""
        tensors: list[tuple[str, torch.dtype, Shape]] = []
        rows: dict[int, list[list[int]]] = {}
        may_differ = []
        for number, entry in enumerate(entries):
            if entry.may_differ:
                may_differ.append(entry.key)
            tensors.append((entry.key, entry.dtype, tuple(entry.sharding.shape)))
            for box in entry.sharding.boxes:
                rows.setdefault(len(box.start), []).append([number, *box.start, *box.size])
        as_tensors = {dims: torch.tensor(boxes, device="cpu") for dims, boxes in rows.items()}
        return cls(tensors=tuple(tensors), rows=as_tensors, may_differ=tuple(may_differ))

    def encode(self) -> bytes:
        """The claims as bytes, equal for equal claims."""
        head = {
            "tensors": [(key, str(dtype).partition(".")[2], shape) for key, dtype, shape in self.tensors],
            "rows": [(dims, len(rows)) for dims, rows in sorted(self.rows.items())],
            "may_differ": self.may_differ,
        }
        text = json.dumps(head).encode()
        body = b"".join(bytes_of(rows.contiguous()) for _, rows in sorted(self.rows.items()))
        return zlib.compress(len(text).to_bytes(8) + text + body, 1)

    @classmethod
    def decode(cls, data: bytes) -> "Claims":
        """The claims that `encode` made bytes of."""
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
    """32 bytes that stand for longer ones where only equality counts."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    """One tensor of the checkpoint, the different boxes of it that ranks hold, and which ranks hold which box.

    Args:
        key: Its section and name.
        dtype: The dtype on disk.
        shape: The global shape.
        starts: int64 (boxes, dims), sorted by the first element in row-major order.
        sizes: int64 (boxes, dims).
        ranks: int64, the holders of all boxes, box by box.
        first: Where the holders of each box begin in `ranks`, and one more: where the last ones end.
    """

    key: str
    dtype: torch.dtype
    shape: Shape
    starts: torch.Tensor
    sizes: torch.Tensor
    ranks: torch.Tensor
    first: tuple[int, ...]

    @property
    def name(self) -> str:
        """The tensor's name in the files."""
        return name_of(self.key)

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor on disk."""
        return self.dtype.itemsize * math.prod(self.shape)

    def holders(self, box: int) -> torch.Tensor:
        """The ranks that hold a box, ascending."""
        return self.ranks[self.first[box] : self.first[box + 1]]

    def __len__(self) -> int:
        return len(self.first) - 1


_Holders = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]
"""Starts, sizes, ranks and first of a `GlobalTensor`."""


def merge(claims: Sequence[tuple[Sequence[int], Claims]]) -> list[GlobalTensor]:
    """All claims put together, tensors in the order in which they first appear.

    Args:
        claims: Ranks, and what each of them claims.

    Raises:
        ValueError: Ranks that give one name different dtypes or shapes.
    """
    known: dict[str, tuple[int, torch.dtype, Shape, int]] = {}  # number, dtype, shape, and the rank that said so
    numbers_of: dict[Tensors, torch.Tensor] = {}  # most ranks name the same tensors
    for ranks, claim in claims:
        if claim.tensors in numbers_of:
            continue
        for key, dtype, shape in claim.tensors:
            _, first_dtype, first_shape, first_rank = known.setdefault(key, (len(known), dtype, shape, ranks[0]))
            if (first_dtype, first_shape) != (dtype, shape):
                raise ValueError(
                    f"{name_of(key)!r} is {first_dtype} {first_shape} on rank {first_rank}, but {dtype} {shape} on "
                    f"rank {ranks[0]}; a local tensor that is a part of a larger one needs a record: "
                    "layout={name: Sharding(...)}"
                )
        numbers = [known[key][0] for key, _, _ in claim.tensors]
        numbers_of[claim.tensors] = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    boxes_of = _boxes_by_tensor(claims, [numbers_of[claim.tensors] for _, claim in claims])
    ranks_of = [ranks for ranks, _ in claims]
    may_differ = {key for _, claim in claims for key in claim.may_differ}
    united: dict[tuple[int, bytes, bytes, bool], _Holders] = {}  # layers of one shape are cut alike: the work is kept
    merged = []
    for key, (number, dtype, shape, _) in known.items():
        dims = len(shape)
        boxes, sources = boxes_of.get(number) or (  # nobody holds anything of it, as of a tensor without elements
            torch.empty(0, 2 * dims, dtype=torch.int64, device="cpu"),
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )
        same = dims, bytes(bytes_of(boxes)), bytes(bytes_of(sources)), key in may_differ
        if same not in united:
            united[same] = _united(dims, boxes, sources, ranks_of, only_first=key in may_differ)
        starts, sizes, ranks_, first = united[same]
        merged.append(
            GlobalTensor(key=key, dtype=dtype, shape=shape, starts=starts, sizes=sizes, ranks=ranks_, first=first)
        )
    return merged


def _boxes_by_tensor(
    claims: Sequence[tuple[Sequence[int], Claims]], numbers: Sequence[torch.Tensor]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By number of a tensor: its boxes, int64 (boxes, 2 dims), and int64 (boxes): which of the claims each is from.

    Args:
        claims: What is claimed.
        numbers: For each of the claims: the numbers of its tensors.
    """
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for dims in {dims for _, claim in claims for dims in claim.rows}:
        parts = [(i, claim.rows[dims]) for i, (_, claim) in enumerate(claims) if dims in claim.rows]
        rows = torch.cat([part for _, part in parts])
        source = torch.cat([torch.full((len(part),), i, device="cpu") for i, part in parts])
        tensor = torch.cat([numbers[i][part[:, 0]] for i, part in parts])
        order = tensor.argsort(stable=True)
        which, counts = tensor[order].unique_consecutive(return_counts=True)
        split = counts.tolist()
        pieces = zip(which.tolist(), rows[order, 1:].split(split), source[order].split(split), strict=True)
        found.update((number, (boxes, sources)) for number, boxes, sources in pieces)
    return found


def _united(
    dims: int, boxes: torch.Tensor, sources: torch.Tensor, ranks: Sequence[Sequence[int]], *, only_first: bool
) -> _Holders:
    """One tensor's different boxes and their holders: equal boxes become one box with several holders.

    Args:
        dims: The tensor's number of dims.
        boxes: int64 (boxes, 2 dims), start and size.
        sources: int64 (boxes), which of the claims each box is from.
        ranks: The ranks of each of the claims.
        only_first: Whether the first holder of a box counts alone, as the others may have other values.
    """
    if len(boxes) <= 1 or dims == 0:
        unique, which = boxes[:1], torch.zeros(len(boxes), dtype=torch.int64, device="cpu")
    else:
        unique, which = boxes.unique(dim=0, return_inverse=True)  # sorted row by row: by start, first dim first
    holders: list[list[int]] = [[] for _ in range(len(unique))]
    for box, source in zip(which.tolist(), sources.tolist(), strict=True):
        holders[box].extend(ranks[source])
    # A rank has a box twice where two tensors of its optimizer hold parts of one parameter, and count steps each.
    holders = [sorted(set(box))[: 1 if only_first else None] for box in holders]
    return (
        unique[:, :dims],
        unique[:, dims:],
        torch.tensor([rank for box in holders for rank in box], dtype=torch.int64, device="cpu"),
        tuple(itertools.accumulate((len(box) for box in holders), initial=0)),
    )


def check_covered(tensors: Iterable[GlobalTensor]) -> None:
    """Checks that every element of every tensor is held by some rank.

    Raises:
        ValueError: Naming the tensors with gaps.
    """
    proven: set[tuple[Shape, bytes]] = set()  # layers of one shape are cut alike, so most need no second look
    gaps = []
    for tensor in tensors:
        geometry = tensor.shape, bytes(bytes_of(torch.cat([tensor.starts, tensor.sizes], 1).contiguous()))
        if geometry not in proven:
            if not is_covered(tensor.shape, tensor.starts, tensor.sizes):
                gaps.append(tensor)
            proven.add(geometry)
    if gaps:
        named = ", ".join(f"{gap.name!r} {gap.shape} ({int(gap.sizes.prod(1).sum())} held)" for gap in gaps[:5])
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
