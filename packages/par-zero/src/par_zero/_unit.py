"""An FSDP unit of stage 3: modules whose parameters are gathered and freed together, and the state of the parameters.

    FREED --begin_gathering--> ARRIVING --wait--> HIDDEN --show--> SHOWN --hide--> HIDDEN
                                                                                           all of them --free--> FREED

A freed parameter is not a view of freed memory: it shows this rank's shard, a flat tensor. Autograd saves views of the
gathered buffer for backward. The buffer is therefore freed and allocated again within the same storage.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import nn

from ._collectives import Handle, all_gather
from ._torch_private import without_new_version
from .layout.chunk import Chunk
from .layout.units import outer_units, unit_names
from .offload.link import MemoryLink
from .watch.outputs import SideOutputs

if TYPE_CHECKING:
    from .offload.shards import DiskShards


class UnitState(Enum):
    """The state of a unit's parameters, and of the memory for the full parameters."""

    FREED = auto()
    """The parameters show this rank's shard, and no memory for full parameters is allocated."""

    ARRIVING = auto()
    """The parameters show this rank's shard, and an all-gather fills the memory for full parameters."""

    HIDDEN = auto()
    """The parameters show this rank's shard, although the full parameters are gathered."""

    SHOWN = auto()
    """The parameters show their full values."""


class Unit:
    """An FSDP unit: modules that run one after the other, and the chunks with their parameters.

    Args:
        number: Index among the units; 0 is the root's own unit.
        name: Name in error messages, such as "'blocks.1'".
        modules: Modules of the unit, without their children.
        chunks: Chunks with the parameters of the modules and of their children.
        outer: Numbers of the units around this unit. Default: none.

    Attributes:
        label: Name in programs, such as "blocks.1".
        state: State of the parameters.
        kept: Whether the parameters stay gathered for later passes.
        running: Number of forward calls in progress.
        outer: Numbers of the units around this unit.
        side: Tensors that the modules store in attributes instead of returning them.
        shards: Reader of this rank's shards that are stored on a disk. None: all shards are in memory.
        link: Link from the host of an accelerator, which copies shards to the device.
        on_read: Function that is called with the chunks before this rank's shards are read, because a step of them may
            be in progress. None: the shards are always up to date.
        on_written: Function that is called with a chunk when its shard has taken what a program wrote in a forward.
    """

    def __init__(
        self,
        number: int,
        name: str,
        modules: Sequence[nn.Module],
        chunks: Sequence[Chunk],
        outer: Iterable[int] = (),
    ) -> None:
        self.number, self.name, self.modules, self.chunks = number, name, tuple(modules), tuple(chunks)
        self.label = name.replace("'", "")
        self.state = UnitState.FREED  # the caller has packed the parameters into chunks
        self.kept = False
        self.running = 0
        self.outer = frozenset(outer)
        self.side = SideOutputs([])
        self.shards: DiskShards | None = None
        self.link = MemoryLink()
        self.on_read: Callable[[Sequence[Chunk]], None] | None = None
        self.on_written: Callable[[Chunk], None] = lambda _: None
        self._handles: list[Handle] = []

    @property
    def size(self) -> int:
        """Bytes of the full parameters."""
        return sum(chunk.layout.size * chunk.own.element_size() for chunk in self.chunks)

    @property
    def device(self) -> torch.device:
        """Device of the parameters; the CPU if the unit has no parameters."""
        return self.chunks[0].device if self.chunks else torch.device("cpu")

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are in memory."""
        return self.state in (UnitState.SHOWN, UnitState.HIDDEN)

    @property
    def freed(self) -> bool:
        """Whether the full parameters are neither in memory nor arriving."""
        return self.state is UnitState.FREED

    def _check(self, what: str, *states: UnitState) -> None:
        """Raise if the unit is in none of some states, because the caller would read or free unallocated memory."""
        if self.chunks and self.state not in states:
            raise RuntimeError(f"{self.name} is {self.state.name} and cannot be {what}; a bug of par-zero")

    def note(self, op: str) -> None:
        """Record an entry of the program, such as "gather", for this unit."""
        if self.chunks:
            self.chunks[0].meter.note(op, self.label)

    def await_step(self) -> None:
        """Wait until the latest step has updated this rank's shards."""
        if self.on_read is not None:
            self.on_read(self.chunks)

    def begin_gathering(self) -> None:
        """Allocate memory for the full parameters of a freed unit, and begin the all-gathers that fill it."""
        self._check("gathered", UnitState.FREED)
        self.await_step()
        self.state = UnitState.ARRIVING
        self.note("gather")
        for chunk in self.chunks:
            chunk.resize_(chunk.layout.size)
            # Autograd has saved views of this buffer. It would reject them in backward if their version increased.
            with without_new_version(chunk.flat):
                self._handles.append(self._begin_all_gather(chunk, chunk.flat))

    def _begin_all_gather(self, chunk: Chunk, flat: torch.Tensor) -> Handle:
        """Begin the all-gather of a chunk. A shard on disk or on the host gets to its position in `flat` first."""
        share = chunk.own
        if chunk.is_on_host:
            share = chunk.share_in(flat)
            # The stream of the copy issues the all-gather, so that the stream that computes waits for both in `wait`.
            with self.link.fetch(chunk, share):
                return all_gather(flat, share, chunk.groups.gathers)
        if self.shards is not None and self.shards.has(chunk):
            share = chunk.share_in(flat)
            self.shards.fetch_(chunk, share)
        return all_gather(flat, share, chunk.groups.gathers)

    def expect(self) -> None:
        """Prefetch this rank's shards from disk, if the unit is freed: it is gathered next."""
        if self.shards is not None and self.freed:
            self.shards.prefetch(self.chunks)

    def join_gather(self) -> None:
        """Join the all-gathers of the other ranks, and drop the result."""
        self.await_step()
        # Buffers of their own: the caller still uses the gathered parameters in `chunk.flat`.
        unused = [torch.empty(chunk.layout.size, dtype=chunk.own.dtype, device=chunk.device) for chunk in self.chunks]
        self._wait_for([self._begin_all_gather(*each) for each in zip(self.chunks, unused, strict=True)])

    def wait(self) -> None:
        """Wait until the all-gathers in flight have filled the memory. If one of them fails, the unit is freed."""
        if self.state is UnitState.ARRIVING:
            handles, self._handles, self.state = self._handles, [], UnitState.FREED
            self._wait_for(handles)
            self.state = UnitState.HIDDEN

    def _wait_for(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.wait()
        # A single rank gathers nothing, so no handle waits for the copies from the host.
        if handles:
            self.link.wait_for(self.chunks)

    def gather(self) -> None:
        """Show the full parameters, from any state. All-gathers over the group if the unit is freed."""
        if self.state is UnitState.FREED:
            self.begin_gathering()
        self.wait()
        self.show()

    def show(self) -> None:
        """Let the parameters of a gathered unit show their full values."""
        if self.state is UnitState.SHOWN:
            return
        self._check("shown", UnitState.HIDDEN)
        self.state = UnitState.SHOWN
        for chunk in self.chunks:
            chunk.show_whole()

    def hide(self) -> None:
        """Let the parameters show this rank's shard, while the full parameters stay in memory.

        A forward may write its own parameters, for example to clip or to normalize them. Every rank writes the same
        values, so each rank keeps its slice of them, and the next gather returns what the program wrote.
        """
        if self.state is not UnitState.SHOWN:
            return
        self.state = UnitState.HIDDEN
        for chunk in self.chunks:
            if chunk.may_be_written and self._copy_back(chunk):
                self.on_written(chunk)
            chunk.show_share()

    def free(self) -> None:
        """Free the memory of the full parameters."""
        # An all-gather in flight would write into freed memory.
        self.wait()
        self.hide()
        if self.state is not UnitState.FREED:
            self.note("free")
        self.state, self.kept = UnitState.FREED, False
        for chunk in self.chunks:
            chunk.resize_(0)

    def write_back(self) -> None:
        """Copy this rank's slice of the full parameters into its shard, so that writes of the caller are kept."""
        self._check("written back", UnitState.HIDDEN, UnitState.SHOWN)
        for chunk in self.chunks:
            self._copy_back(chunk)

    def _copy_back(self, chunk: Chunk) -> bool:
        """Copy this rank's slice of a full chunk into its shard. Return whether they differed."""
        # The host waits here for copies of the shard to an accelerator, which its own write could overtake.
        part = chunk.share_in(chunk.flat).to(chunk.own.device)
        # Even an equal copy changes the version of a shard on disk, which discards its prefetch.
        differs = not torch.equal(chunk.own, part)
        if differs:
            chunk.own.copy_(part)
        return differs


def make_units(root: nn.Module, modules: Sequence[Sequence[nn.Module]], chunks: Sequence[Chunk]) -> list[Unit]:
    """Return the units of a sharded module.

    Args:
        root: Module that is sharded.
        modules: Modules of each unit, as `choose_units` returns them.
        chunks: Chunks of the module.
    """
    described = zip(unit_names(root, modules), modules, outer_units(modules), strict=True)
    return [
        Unit(number, name, own, [chunk for chunk in chunks if chunk.plan.place.unit == number], outer)
        for number, (name, own, outer) in enumerate(described)
    ]
