"""The recorder that turns the meter's notes of a step into its program."""

from collections.abc import Sequence

import torch.distributed as dist

from .._collectives import is_gloo
from .._unit import Unit
from ..layout.chunk import Chunk
from ..layout.meter import Meter
from ..reduce.reducer import Reducer
from .ledger import ChunkBytes, HeldMemory, ProgramEntry, ZeroProgram


class StepRecord:
    """The record of the latest step: its entries, and the memory that was allocated before it.

    Args:
        chunks: All chunks of a module.
        units: Units of the module at stage 3; empty below stage 3.
        reducer: Reducer, which owns the buffers of reductions.
        meter: Meter, which has recorded the entries.
        is_late: Whether a thread may step pieces while the next step begins.
    """

    def __init__(
        self, chunks: Sequence[Chunk], units: Sequence[Unit], reducer: Reducer, meter: Meter, *, is_late: bool
    ) -> None:
        self._chunks, self._units, self._reducer, self._meter = tuple(chunks), tuple(units), reducer, meter
        self._is_late = is_late
        self._start = self._next = HeldMemory()

    def note_stepped(self, chunks: Sequence[Chunk]) -> None:
        """Record the chunks that an optimizer has updated. Chunks in pieces are recorded piece by piece elsewhere."""
        for chunk in chunks:
            if not any(part.in_pieces for part in chunk.slices):
                self._meter.note("step", chunk.name)

    def end_step(self) -> None:
        """Record that an optimizer has stepped."""
        self._meter.note("E")
        # A further optimizer of the same step extends the program, whose start remains. Otherwise a new program begins
        # with the memory that the previous step has left.
        if self._meter.end_step():
            self._start = self._next
        self._next = self._held()

    def _held(self) -> HeldMemory:
        gradients, buffers = self._reducer.gradients, self._reducer.buffers
        return HeldMemory(
            gradients=frozenset(each.chunk.name for each in gradients if each.has_memory),
            casts=frozenset(each.chunk.name for each in gradients if each.is_cast),
            filled=frozenset(each.chunk.name for each in gradients if each.waits_for_sum),
            borrowed={each.chunk.name: each.borrowed for each in gradients if each.borrowed},
            lent=buffers.gradients.sizes,
            received=buffers.received.sizes,
        )

    def forget(self) -> None:
        """Forget the entries of the current step, because a pass has failed."""
        self._meter.forget()
        self._next = self._held()

    @property
    def last(self) -> ZeroProgram | None:
        """Program of the latest step; None before the first step."""
        if not self._meter.done:
            return None
        unit_of = {chunk: unit.label for unit in self._units for chunk in unit.chunks}
        shards_gradients = any(chunk.stage.shards_gradients for chunk in self._chunks)
        return ZeroProgram(
            entries=tuple(ProgramEntry(*each) for each in self._meter.done),
            units={unit.label: unit.size for unit in self._units if unit.chunks},
            chunks={chunk.name: _bytes_of(chunk, unit_of.get(chunk)) for chunk in self._chunks},
            shards_gradients=shards_gradients,
            kept_buffers=self._reducer.buffers.kept,
            is_late=self._is_late,
            start=self._start,
        )


def _bytes_of(chunk: Chunk, unit: str | None) -> ChunkBytes:
    gradient = chunk.layout.size * chunk.reduce_dtype.itemsize
    low, high = chunk.share
    # Over gloo, par-zero replaces the reduce-scatter with an all-to-all, which receives into a separate buffer.
    shares = dist.get_world_size(chunk.groups.shards) > 1 and is_gloo(chunk.own, chunk.groups.shards)
    # The gradients of tensors on the host of an accelerator are cast there.
    cast = sum(
        part.tensor.nbytes
        for part in (chunk.slices if chunk.reduce_dtype != chunk.master.dtype else ())
        if part.tensor.device == chunk.own.device
    )
    return ChunkBytes(
        unit=unit,
        gradient=gradient,
        shard=(high - low) * chunk.reduce_dtype.itemsize if chunk.home.gradients != "host" else 0,
        arriving=chunk.arriving,
        cast=cast if chunk.home.gradients == "device" else 0,
        received=gradient if shares else 0,
    )
