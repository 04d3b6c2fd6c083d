"""Table of one call of a layer: the tensors that autograd saves, and the modules that made them.

The events of a call are listed in their order, so that `replay` takes the same decision for each event as the running
layer. The predicted bytes are therefore exactly the saved bytes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from par_groups import format_bytes

WHOLE = ""
"""Name of the layer relative to itself. A choice that drops it saves only the layer's inputs."""


class Made(NamedTuple):
    """Event: a module whose call can be repeated returned its output.

    Attributes:
        module: Name of the module, relative to the layer.
        source: Number of the storage of its input.
        source_makers: Numbers of the events that made the input, innermost first.
        flops: Floating-point operations of the call.
        moved: Bytes that the call read and wrote.
    """

    module: str
    source: int
    source_makers: tuple[int, ...]
    flops: int
    moved: int


class Saved(NamedTuple):
    """Event: autograd saved a tensor.

    Attributes:
        storage: Number of the tensor's storage.
        makers: Numbers of the events that made the tensor, innermost first.
    """

    storage: int
    makers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Module:
    """Cost and obstacles of one module in a call of the layer, summed over all calls of the module.

    Args:
        flops: Floating-point operations.
        moved: Bytes that operations read and wrote.
        obstacle: Reason why the module cannot be called again, such as "draws random numbers"; None if it can.
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
    """Saved tensors of one call of a layer.

    Args:
        sizes: Bytes of each storage that is saved, or that a module read; 0 for parameters and buffers.
        inputs: Numbers of the storages of the call's arguments.
        events: Saved tensors and module outputs, in order.
        modules: Cost and obstacles of each module, by name relative to the layer; "" is the layer itself.
        flops: Floating-point operations up to the last saved tensor: the cost of running the complete layer again.
        moved: Bytes that operations read and wrote up to the last saved tensor.
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
        # The mapping is read-only, and pickle cannot handle that, so the table travels as its fields.
        return _table, (self.sizes, self.inputs, self.events, dict(self.modules), self.flops, self.moved)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the modules that can be called again, in the order in which they were called."""
        return tuple(dict.fromkeys(event.module for event in self.events if isinstance(event, Made)))

    def __str__(self) -> str:
        """Format a line for each module: its operations, the bytes that dropping it frees, and its obstacle."""
        everything = kept(self, ())
        rows = [("module", "GFLOPs", "saves", "again?")]
        for name, module in self.modules.items():
            saves = everything - kept(self, {name}) if name == WHOLE or module.obstacle is None else 0
            rows.append((name or "(layer)", f"{module.flops / 1e9:.3f}", format_bytes(saves), module.obstacle or "yes"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"all together {format_bytes(everything)}"])


def _table(*values: object) -> Table:
    """Build a table from its fields for pickle, because a read-only mapping cannot be pickled."""
    names = ("sizes", "inputs", "events", "modules", "flops", "moved")
    return Table(**dict(zip(names, values, strict=True)))  # type: ignore[arg-type]


class Replay(NamedTuple):
    """Storages that a layer saves, and calls that it repeats.

    Args:
        storages: Numbers of the saved storages.
        again: Numbers of the events that backward repeats, each event once.
    """

    storages: frozenset[int]
    again: frozenset[int]


def replay(table: Table, dropped: Collection[str]) -> Replay:
    """Replay the events of a call under a choice of dropped modules, as the running layer does. Pure.

    Args:
        table: Table of the call.
        dropped: Names of modules whose outputs are recomputed; names that are not candidates have no effect.
    """
    if WHOLE in dropped:
        return Replay(table.inputs, frozenset())
    resident: set[int] = set()
    sources: dict[int, tuple[int, int | None]] = {}  # of each dropped event: its input's storage, and who makes it

    def pack(storage: int, makers: tuple[int, ...]) -> tuple[int, int | None]:
        # A storage that is saved anyway costs nothing more, so only a storage that is not saved yet is made again.
        if storage not in resident:
            for maker in makers:
                # The innermost dropped module is repeated, because it needs the least arithmetic.
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
    # A repeated call needs its own input, which may come from another repeated call.
    while needed:
        storage, maker = needed.pop()
        if maker is None:
            storages.add(storage)
        elif maker not in again:
            again.add(maker)
            needed.append(sources[maker])
    return Replay(frozenset(storages), frozenset(again))


def kept(table: Table, dropped: Collection[str]) -> int:
    """Return the bytes that one call of a layer saves until its backward. Pure.

    Args:
        table: Table of the call, from `measure`.
        dropped: Names, relative to the layer, of modules whose outputs are recomputed. "" is the layer itself; then
            only its inputs are saved. Names that are not candidates have no effect.

    Returns:
        Bytes of the storages, each counted once; parameters and buffers do not count.
    """
    return sum(table.sizes[storage] for storage in replay(table, dropped).storages)
