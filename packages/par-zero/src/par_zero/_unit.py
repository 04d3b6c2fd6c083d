"""A unit of stage 3: modules whose parameters are gathered and freed together, and where these parameters are now.

    FREED --begin_gathering--> ARRIVING --show--> SHOWN --hide--> HIDDEN --show--> SHOWN
                                                                                           all of them --free--> FREED

A freed parameter is not left as a view of memory that is gone: it shows this rank's part of it, a flat tensor. Autograd
keeps views of the gathered buffer, so its memory is given back and taken again under the same storage.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import nn

from ._collectives import Handle, all_gather
from ._torch_private import without_new_version
from .layout.chunk import Chunk
from .watch.outputs import SideOutputs

if TYPE_CHECKING:
    from .offload.shards import DiskShards


class State(Enum):
    """What the parameters of a unit show, and what is in the memory for whole ones."""

    FREED = auto()
    """The parameters show this rank's part of them, and there is no memory for whole ones."""

    ARRIVING = auto()
    """The parameters show this rank's part of them, and an all-gather fills the memory."""

    HIDDEN = auto()
    """The parameters show this rank's part of them, though they are there as a whole."""

    SHOWN = auto()
    """The parameters are whole."""


class Unit:
    """Modules that run one after the other, and the chunks that hold their parameters.

    Args:
        number: Its place among the units; 0 is the root's own.
        name: What errors call it, such as "'blocks.1'".
        modules: The modules, without their children.
        chunks: The chunks that hold parameters of theirs or of their children.
        outer: Numbers of the units around it.

    Attributes:
        label: Its name as a trace has it, such as "blocks.1".
        state: Where its parameters are.
        kept: Whether they stay gathered for later passes too.
        running: Number of calls of forward that are under way.
        outer: Numbers of the units around it.
        side: What its modules leave in attributes instead of returning it.
        shards: Reader of this rank's shards that are on a disk. None: all are in memory.
        on_read: Called with its chunks before this rank's parts of them are read: a step of them may be under way.
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
        self.state = State.FREED  # as the parameters are packed
        self.kept = False
        self.running = 0
        self.outer = frozenset(outer)
        self.side = SideOutputs([])
        self.shards: DiskShards | None = None
        self.on_read: Callable[[Sequence[Chunk]], None] | None = None
        self._handles: list[Handle] = []

    @property
    def size(self) -> int:
        """Bytes of whole parameters."""
        return sum(chunk.layout.size * chunk.own.element_size() for chunk in self.chunks)

    @property
    def device(self) -> torch.device:
        """Where its parameters lie; the CPU if it has none."""
        return self.chunks[0].own.device if self.chunks else torch.device("cpu")

    @property
    def gathered(self) -> bool:
        """Whether the parameters are there as a whole."""
        return self.state in (State.SHOWN, State.HIDDEN)

    @property
    def freed(self) -> bool:
        """Whether nothing of whole parameters is there or on its way."""
        return self.state is State.FREED

    def _check(self, what: str, *states: State) -> None:
        """Refuses what cannot be done in the state that it is in: it would read or drop memory that is not there."""
        if self.chunks and self.state not in states:
            raise RuntimeError(f"{self.name} is {self.state.name} and cannot be {what}; a bug of par-zero")

    def note(self, op: str) -> None:
        """Records what is done with it, or that it runs."""
        if self.chunks:
            self.chunks[0].meter.note(op, self.label)

    def await_step(self) -> None:
        """Waits until this rank's parts are those after the latest step."""
        if self.on_read is not None:
            self.on_read(self.chunks)

    def begin_gathering(self) -> None:
        """Takes memory for whole parameters of a freed unit, and begins to fill it. All-gathers."""
        self._check("gathered", State.FREED)
        self.await_step()
        self.state = State.ARRIVING
        self.note("gather")
        for chunk in self.chunks:
            chunk.resize_(chunk.layout.size)
            with without_new_version(chunk.flat):
                self._handles.append(all_gather(chunk.flat, self._share(chunk, chunk.flat), chunk.groups.gathers))

    def _share(self, chunk: Chunk, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a chunk in memory: what comes from a disk is read to its place among all parts."""
        if self.shards is None or not self.shards.has(chunk):
            return chunk.own
        share = chunk.share_in(flat)
        self.shards.fetch_(chunk, share)
        return share

    def expect(self) -> None:
        """Begins to read this rank's parts, if they lie on a disk and the unit is freed: it is gathered next."""
        if self.shards is not None and self.freed:
            self.shards.prefetch(self.chunks)

    def take_part(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Gives the other ranks this one's shares, which has no need of theirs. All-gathers.

        Args:
            meanwhile: Is called when that has begun, and before it is waited for.
        """
        self.await_step()
        handles = []
        for chunk in self.chunks:
            unused = torch.empty(chunk.layout.size, dtype=chunk.own.dtype, device=chunk.own.device)
            handles.append(all_gather(unused, self._share(chunk, unused), chunk.groups.gathers))
        meanwhile()
        for handle in handles:
            handle.wait()

    def wait(self) -> None:
        """Waits until an all-gather under way has filled the memory."""
        for handle in self._handles:
            handle.wait()
        self._handles.clear()
        if self.state is State.ARRIVING:
            self.state = State.HIDDEN

    def gather(self) -> None:
        """Makes parameters whole and shows them, whatever was before. All-gather over the group, if they are freed."""
        if self.state is State.FREED:
            self.begin_gathering()
        self.wait()
        self.show()

    def show(self) -> None:
        """The parameters of a gathered unit become whole."""
        if self.state is State.SHOWN:
            return
        self._check("shown", State.HIDDEN)
        self.state = State.SHOWN
        for chunk in self.chunks:
            chunk.show_whole()

    def hide(self) -> None:
        """The parameters show this rank's part; a pass that needs them whole shows them, or gathers them again."""
        if self.state is not State.SHOWN:
            return
        self.state = State.HIDDEN
        for chunk in self.chunks:
            chunk.show_share()

    def free(self) -> None:
        """Gives back the memory of whole parameters."""
        self.wait()
        self.hide()
        if self.state is not State.FREED:
            self.note("free")
        self.state, self.kept = State.FREED, False
        for chunk in self.chunks:
            chunk.resize_(0)

    def write_back(self) -> None:
        """This rank's part becomes what was written to whole parameters."""
        self._check("written back", State.HIDDEN, State.SHOWN)
        for chunk in self.chunks:
            low, high = chunk.share
            part = chunk.flat[low:high]
            if self.shards is None or not self.shards.has(chunk) or not torch.equal(chunk.own, part):
                chunk.own.copy_(part)
