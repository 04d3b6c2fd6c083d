"""Parameters that arrive after a step at stages 0 to 2, during the next forward: a read of a parameter waits.

- Step: the optimizer updates this rank's shards. All chunks are gathered, in the opposite order of their reductions: a
  gradient is complete when backward has passed the first read of its parameter in forward.
- Forward: a read of a parameter waits for its chunk. The later chunks continue to arrive.

If a thread steps a part of the optimizer on the host of an accelerator, the all-gather of a chunk begins at its first
read, or when backward begins. The chunks before it in the common order begin first, so all ranks begin them in one
order.

Hooks on modules cannot find all reads of a parameter. Attention may read the weight of an inner layer that it never
calls. Gradient norms, checkpoints and weight averages read parameters outside of any forward. The parameter itself
therefore waits: torch passes every operation on it to the `__torch_function__` of its class. The first operation that
reads its values waits for the chunk, and the parameters of the chunk become ordinary parameters again.

Code that reads memory without torch's functions cannot wait: compiled code, captured graphs and extensions. If compiled
code may read the parameters, a step waits for its all-gathers at once. It also waits over gloo, whose threads would
slow down the computation. Captured graphs and extensions are detected when the gradient of an arriving parameter
arrives, before the optimizer uses it.

Code counts as a reader, and all later steps wait at once, if

- `shard` finds a compiled module,
- torch.compile compiles the frames around a call of the module, or
- torch.compile begins to compile anything after the first forward, but not within an optimizer's step. An older graph
  that meets an arriving parameter is compiled again, since torch.compile guards on its class. Before it is traced, the
  parameters arrive and have their own classes again.

Functions that are compiled before the first forward or within a step do not matter. A data loader's function matters if
it is compiled later, even for another shape: torch does not say which code is compiled.

If a thread steps, all later steps wait at once as soon as torch.compile was called anywhere in the process.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from par_groups import WatchedParameter, WatchedWeight, is_compiled

from ._collectives import Handle, all_gather, is_gloo
from ._torch_private import READS_NO_VALUES, call_before_compile, compiles_frames, has_compiled, without_torch_functions
from .layout.chunk import Chunk
from .reduce.reducer import Reducer

_ORDINARY = (nn.Parameter, WatchedWeight)
"""Classes without operations of their own, from which a parameter may leave while it is in flight."""


class ArrivingParameter(nn.Parameter):
    """A parameter whose all-gather is in flight: the first operation on its values waits for the all-gather.

    Each chunk has subclasses of its own, so that torch passes to `__torch_function__` which chunks an operation reads.
    """

    wait_for_gather: ClassVar[Callable[[], None]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters that an operation reads or writes, then run the operation."""
        # Code such as `zero_grad` reads this metadata of all parameters, and must not end the overlap.
        if func in READS_NO_VALUES:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, ArrivingParameter):
                kind.wait_for_gather()
        return func(*args, **(kwargs or {}))

    # `wait_for_gather` gives the tensor back its class, so the method that each of these calls is that class's.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).wait_for_gather()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).wait_for_gather()
        return self.__reduce_ex__(protocol)


class Arrival:
    """The tensors of a chunk whose all-gather may be in flight: the module's parameters, and the optimizer's slices.

    The all-gather sends the memory of the slices to the other ranks. A write between the step and the next forward,
    such as that of a step post hook, a schedule-free `eval()` or a Lookahead, would race with it.

    Args:
        chunk: The chunk.
        arriving: Numbers of the chunks whose all-gathers are in flight. This object updates the set.
    """

    def __init__(self, chunk: Chunk, arriving: set[int]) -> None:
        self._number, self._arriving, self._chunk = chunk.number, arriving, chunk
        self._class_of = {
            kind: type("ArrivingParameter", (ArrivingParameter, kind), {"wait_for_gather": self.wait})
            for kind in (nn.Parameter, WatchedWeight, WatchedParameter)
        }
        self._in_flight: list[tuple[nn.Parameter, type[nn.Parameter]]] = []  # tensors, with their own classes
        self._lock = Lock()
        self._handle: Handle | None = None
        self._stream: torch.Stream | None = None

    def begin(self, handle: Handle) -> None:
        """Let the tensors of the chunk wait for an all-gather in flight.

        Args:
            handle: Handle of the all-gather, which began on the current stream.
        """
        self._handle = handle
        tensors = [*self._chunk.parameters]
        device = self._chunk.flat.device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._arriving.add(self._number)
        # Otherwise the optimizer holds copies, which no collective reads or writes.
        if self._chunk.master is self._chunk.own:
            tensors += [part.tensor for part in self._chunk.slices if not part.in_pieces]
        self._in_flight = [(tensor, type(tensor)) for tensor in tensors]
        for tensor, kind in self._in_flight:
            tensor.__class__ = self._class_of[kind]

    def __del__(self) -> None:
        """Wait for the all-gather if the module is dropped before anybody reads its parameters."""
        # Other tensors could take the memory of the chunk at once, and the all-gather would still write to it. Only the
        # stream waits. On a CPU nothing waits: the host could wait forever for a rank that has failed, and gloo keeps
        # the memory that it writes.
        if self._handle is not None and self._stream is not None and not sys.is_finalizing():
            with self._stream:
                self._handle.abandon()

    def wait(self) -> None:
        """Wait for the all-gather on the stream of the step, and let the current stream wait for that stream."""
        # Several threads may read parameters of one chunk at the same time, and only one may give back their classes.
        with self._lock:
            if self._handle is None:
                return
            with nullcontext() if self._stream is None else self._stream:
                self._handle.wait()
            if self._stream is not None:
                current = torch.accelerator.current_stream(self._stream.device)
                if current != self._stream:
                    current.wait_stream(self._stream)
            for tensor, kind in self._in_flight:
                # A step in the meantime may have set the class of a slice to nn.Parameter, which must stay.
                if type(tensor) is not nn.Parameter:
                    tensor.__class__ = kind
            self._arriving.discard(self._number)
            self._handle = None


class Arrivals:
    """The parameters that arrive after a step, at stages 0 to 2.

    Args:
        module: Sharded module.
        chunks: Trained chunks.
        reducer: Reducer, whose order is equal on all ranks. It raises if code reads a chunk without torch's functions.
        wait_for_step: Function that waits for a late step of some chunks on this rank. None: no step is late.

    Attributes:
        in_use: Whether a frame that is compiled now may read parameters.
        late: Whether a step may return while its all-gathers are in flight.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: Sequence[Chunk],
        reducer: Reducer,
        wait_for_step: Callable[[Sequence[Chunk]], None] | None = None,
    ) -> None:
        self._reducer, self._arriving, self._wait_for_step = reducer, reducer.arriving, wait_for_step
        self._delayed: list[Chunk] = []  # chunks that a late step may still update, in the order of all-gathers
        self._handles: dict[Chunk, Handle] = {}  # of delayed chunks whose all-gathers have begun
        self._beginning = Lock()  # threads that read several chunks must begin the all-gathers in one order
        self.in_use = False
        by_gloo = any(is_gloo(chunk.flat, chunk.groups.shards) for chunk in chunks)
        cut = any(dist.get_world_size(chunk.groups.shards) > 1 for chunk in chunks)
        late = ((cut and not by_gloo) or wait_for_step is not None) and not any(map(is_compiled, module.modules()))
        # Another subclass has operations of its own, which it would lose with its class while it is in flight.
        ordinary = [c for c in chunks if late and all(type(member.parameter) in _ORDINARY for member in c.members)]
        self._arrivals = {chunk.number: Arrival(chunk, reducer.arriving) for chunk in ordinary}
        self.late = bool(self._arrivals)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Begin the all-gathers of chunks, and wait for the chunks whose parameters cannot wait on first use.

        Args:
            chunks: Chunks that an optimizer has updated.
        """
        watch_compiles(self)
        updated = {chunk.number: chunk for chunk in chunks}
        handles: list[Handle] = []
        for chunk in [updated[number] for number in reversed(self._reducer.order.numbers) if number in updated]:
            if self._wait_for_step is None:
                handle = _gather(chunk)
            else:
                self._delayed.append(chunk)
                handle = Handle([], partial(self._wait_for_delayed, chunk))
            if self.late and chunk.number in self._arrivals:
                self._arrivals[chunk.number].begin(handle)
            else:
                handles.append(handle)
        for handle in handles:
            handle.wait()

    def begin_delayed(self, last: Chunk | None = None) -> None:
        """Begin all-gathers that a late step has delayed, after waiting for the step.

        Args:
            last: Chunk whose all-gather is the last one to begin. None: all of them begin.
        """
        with self._beginning:
            while self._wait_for_step is not None and self._delayed and last not in self._handles:
                chunk = self._delayed.pop(0)
                self._wait_for_step([chunk])
                self._handles[chunk] = _gather(chunk)

    def _wait_for_delayed(self, chunk: Chunk) -> None:
        """Wait for the late step of a chunk on all ranks, and for its parameters."""
        self.begin_delayed(chunk)
        self._handles.pop(chunk).wait()
        # The all-gather of another chunk may have begun on another stream, which has waited for the step in its place.
        if self._wait_for_step is not None:
            self._wait_for_step([chunk])

    def wait(self, chunks: Sequence[Chunk]) -> None:
        """Wait until the parameters of some chunks have arrived."""
        for number in self._arriving.intersection([chunk.number for chunk in chunks]):
            self._arrivals[number].wait()

    def _before_compile(self) -> None:
        """Let all later steps wait for their all-gathers, if the code that is compiled now may read parameters."""
        if self.in_use:
            self.late = False
            for arrival in self._arrivals.values():
                arrival.wait()


def watch_compiles(arrivals: Arrivals, *_: Any) -> None:
    """Let no parameter arrive within compiled code from now on. Register it under `skip_frame` before a forward."""
    arrivals.in_use = True
    # A thread that steps needs torch's lock if the optimizer is compiled, so nothing may wait for it under that lock.
    if arrivals.late and (callable(compiles_frames()) or (arrivals._wait_for_step is not None and has_compiled())):
        torch.compiler.disable(arrivals._before_compile)()
    elif arrivals.late and arrivals._wait_for_step is None:
        call_before_compile(arrivals._before_compile)


def _gather(chunk: Chunk) -> Handle:
    """Begin the all-gather of a chunk, if its ranks have stepped different shards."""
    if not chunk.stage.shards_state:
        return Handle([])
    chunk.meter.note("gather", chunk.name)
    return all_gather(chunk.flat, chunk.own, chunk.groups.shards, overlapped=False)
