"""What autograd saves in one call of a layer, which module made it, and what is kept if some are made again.

The events of a call stand in their order, so that `replay` decides for each of them what the running layer decides:
the bytes that it predicts are the bytes that are kept.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from par_groups import format_bytes

WHOLE = ""
"""The name of the layer itself, relative to itself: who drops it keeps its inputs alone."""


class Made(NamedTuple):
    """A module's call that can be repeated gave its output.

    Attributes:
        module: Name of the module, relative to the layer.
        source: Number of the storage of its input.
        source_makers: Numbers of the events that made what the input is, innermost first.
        flops: Floating-point operations of the call.
        moved: Bytes that the call read and wrote.
    """

    module: str
    source: int
    source_makers: tuple[int, ...]
    flops: int
    moved: int


class Saved(NamedTuple):
    """Autograd saved a tensor.

    Attributes:
        storage: Number of the storage that it lies in.
        makers: Numbers of the events that made what it is, innermost first.
    """

    storage: int
    makers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Module:
    """What a call of the layer does in one of its modules, all calls of the module together.

    Args:
        flops: Floating-point operations.
        moved: Bytes that operations read and wrote.
        obstacle: Why the module cannot be called again, such as "draws random numbers"; None if it can.
        draws: Whether it draws random numbers.
        communicates: Whether it calls a collective.
        writes: Whether it writes into its buffers or parameters.
    """

    flops: int
    moved: int
    obstacle: str | None
    draws: bool = False
    communicates: bool = False
    writes: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one call of a layer saves for its backward.

    Args:
        sizes: Bytes of each storage that is saved, or that a module read; 0 for parameters and buffers.
        inputs: Numbers of the storages that the call was given.
        events: What was saved and made, in order.
        modules: By name relative to the layer: what happens in the module. The layer itself is "".
        flops: Floating-point operations up to the last tensor that is saved: what is done again for the whole layer.
        moved: Bytes that operations read and wrote up to there.
    """

    sizes: tuple[int, ...]
    inputs: frozenset[int]
    events: tuple[Made | Saved, ...]
    modules: Mapping[str, Module]
    flops: int
    moved: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _table, (self.sizes, self.inputs, self.events, dict(self.modules), self.flops, self.moved)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the modules that can be called again, in the order in which they were called."""
        return tuple(dict.fromkeys(event.module for event in self.events if isinstance(event, Made)))

    def __str__(self) -> str:
        """A line for each module: its operations, what is kept without its output, and why it must stay."""
        everything = kept(self, ())
        rows = [("module", "GFLOPs", "saves", "again?")]
        for name, module in self.modules.items():
            saves = everything - kept(self, {name}) if name == WHOLE or module.obstacle is None else 0
            rows.append((name or "(layer)", f"{module.flops / 1e9:.3f}", format_bytes(saves), module.obstacle or "yes"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"all together {format_bytes(everything)}"])


def _table(*values: object) -> Table:
    """A table out of its fields, for pickle: a read-only mapping cannot be pickled."""
    names = ("sizes", "inputs", "events", "modules", "flops", "moved")
    return Table(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]


class Replay(NamedTuple):
    """What a layer keeps.

    Args:
        storages: Numbers of the storages that are kept.
        again: Numbers of the events that happen again in backward, each of them once.
    """

    storages: frozenset[int]
    again: frozenset[int]


def replay(table: Table, dropped: Collection[str]) -> Replay:
    """Goes through the events of a call as the layer does that drops what these modules make. Pure.

    Args:
        table: What the call saves.
        dropped: Names of modules whose outputs are made again; others than candidates change nothing.
    """
    if WHOLE in dropped:
        return Replay(table.inputs, frozenset())
    resident: set[int] = set()
    sources: dict[int, tuple[int, int | None]] = {}  # of each dropped event: its input's storage, and who makes it

    def pack(storage: int, makers: tuple[int, ...]) -> tuple[int, int | None]:
        if storage not in resident:
            for maker in makers:
                if maker in sources:
                    return storage, maker
            resident.add(storage)
        return storage, None

    needed = []
    for number, event in enumerate(table.events):
        if isinstance(event, Saved):
            needed.append(pack(*event))
        elif event.module in dropped:
            sources[number] = pack(event.source, event.source_makers)
    storages, again = set(), set()
    while needed:
        storage, maker = needed.pop()
        if maker is None:
            storages.add(storage)
        elif maker not in again:
            again.add(maker)
            needed.append(sources[maker])
    return Replay(frozenset(storages), frozenset(again))


def kept(table: Table, dropped: Collection[str]) -> int:
    """Bytes that one call of a layer keeps until its backward. Pure.

    Args:
        table: What the call saves, from `measure`.
        dropped: Names, relative to the layer, of modules whose outputs are made again. "" is the layer itself, of which
            the inputs alone stay. Names of others than candidates change nothing.

    Returns:
        Bytes of the storages, each counted once; parameters and buffers do not count.
    """
    return sum(table.sizes[storage] for storage in replay(table, dropped).storages)
