"""Reduced gradients on the host of an accelerator, for state that is stepped there.

backward   reduce chunk k | copy chunk k out
step       a thread waits for the copy of each piece, updates it, and copies its parameters in
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NoReturn

import torch
from torch import nn

from .._torch_private import without_torch_functions
from ..layout.chunk import Chunk
from ..layout.meter import BUFFERS, Meter
from .link import DeviceLink, GradientInFlight, PinnedSlabs
from .piece import DiskPiece

SUMS_IN_FLIGHT = 2
"""Sums that stay on the device for their copies, in multiples of the largest: one is copied while the next is reduced.

A limit of chunks instead of bytes would let the reduction of a matrix wait for the copies of the biases before it.
"""


@dataclass(eq=False, kw_only=True)
class GradientCopy:
    """Copy of a chunk's sum to the host.

    Args:
        events: Event after the copy of each piece. The host updates the first ones while the others are copied.
        total: Memory on the device that is copied. It is kept until the stream that computes has waited for all events.
        bytes: Bytes of the device that only the copy keeps. A sum that the device also steps by keeps its own memory.
        is_applied: Whether a step within backward has the gradients already.
    """

    events: Sequence[torch.Event]
    total: torch.Tensor | None
    bytes: int
    is_applied: bool = False


class HostGradients:
    """Store of reduced gradients in pinned memory of the host, see `GradientStore`.

    Args:
        link: Link to the host.
        pieces: Pieces by chunk, for chunks of which any piece is stepped on the host.

    Attributes:
        step_in_backward: Function that may step the pieces of a chunk at once, with their gradients, and returns
            whether it does. None: pieces are stepped after backward.
    """

    def __init__(self, link: DeviceLink, pieces: Mapping[Chunk, Sequence[DiskPiece]]) -> None:
        self._link, self._pieces = link, {chunk: tuple(each) for chunk, each in pieces.items()}
        self._slabs = PinnedSlabs(
            piece.tensor.numel() * chunk.plan.reduce_dtype.itemsize for chunk in pieces for piece in pieces[chunk]
        )
        self._places = {
            piece: self._slabs.take(chunk.plan.reduce_dtype, piece.tensor.numel())
            for chunk, each in self._pieces.items()
            for piece in each
        }
        self._copies: dict[Chunk, GradientCopy] = {}
        self._held: deque[GradientCopy] = deque()
        self._meter = Meter()  # the engine's, once the engine exists
        self._limit = SUMS_IN_FLIGHT * max(map(_leaving, self._pieces), default=0)
        self.step_in_backward: Callable[[Chunk, Mapping[DiskPiece, torch.Tensor]], bool] | None = None

    @property
    def chunks(self) -> Iterable[Chunk]:
        """Chunks of which any piece is stepped on the host."""
        return self._pieces

    @property
    def bytes(self) -> int:
        """Bytes of host memory: pinned memory, and gradients that were cast to the optimizer's dtype."""
        with without_torch_functions():  # a count waits for no gradient
            casts = [
                piece.tensor.grad.untyped_storage().nbytes()
                for chunk, pieces in self._pieces.items()
                for piece in pieces
                if piece.tensor.grad is not None and piece.tensor.dtype != chunk.plan.reduce_dtype
            ]
        return self._slabs.bytes + sum(casts)

    def write(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Begin to copy this rank's shard of a chunk's sum to the host. `total` may be reused after `bind`."""
        # The stream that computes waits here, and not the host, so the memory in use is the same in every step.
        size = _leaving(chunk)
        while sum(copy.bytes for copy in self._held) + size > self._limit:
            self._release(self._held.popleft())
        self._meter = chunk.meter
        self._meter.add(BUFFERS, size)
        events = self._link.copy_out(
            (self._places[piece], total[piece.offset : piece.offset + piece.tensor.numel()])
            for piece in self._pieces[chunk]
        )
        self._copies[chunk] = copy = GradientCopy(events=events, total=total, bytes=size)
        self._held.append(copy)
        if self.step_in_backward is not None:
            copy.is_applied = self.step_in_backward(chunk, self._gradients_of(chunk, events))

    def bind(self, chunk: Chunk) -> bool:
        """Set the gradients of the optimizer's tensors, which wait for their copies at their first use."""
        # A pass binds all chunks when it ends, so the first one waits for the copies of all.
        self.release()
        copy = self._copies.pop(chunk)
        if copy.is_applied:
            for piece in self._pieces[chunk]:
                piece.tensor.grad = _applied(piece.tensor)
        else:
            for piece, gradient in self._gradients_of(chunk, copy.events).items():
                piece.tensor.grad = gradient
        return True

    @torch.no_grad()
    def add_earlier_(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Add the gradients that the optimizer's tensors have, from earlier microbatches, to a chunk's new ones."""
        low, high = chunk.share
        for piece in self._pieces[chunk]:
            start, stop = max(piece.first, low), min(piece.first + piece.tensor.numel(), high)
            earlier = piece.tensor.grad
            if earlier is None or start >= stop:
                continue
            # The sum is made on the device, in the order in which it would be made without offload. The copy of the
            # earlier gradient out of the device has ended for this stream since `bind`, so no host waits.
            if isinstance(earlier, GradientInFlight):
                earlier = self._places[piece]
            part = earlier.view(-1)[start - piece.first : stop - piece.first]
            total[start - low : stop - low] += part.to(total.device, non_blocking=True).to(total.dtype)

    def _gradients_of(self, chunk: Chunk, events: Sequence[torch.Event]) -> dict[DiskPiece, torch.Tensor]:
        pieces = zip(self._pieces[chunk], events, strict=True)
        return {piece: _in_flight(self._places[piece], piece.tensor, event) for piece, event in pieces}

    def release(self) -> None:
        """Let the stream that computes wait for all copies, also for those of a pass that has failed."""
        while self._held:
            self._release(self._held.popleft())

    def _release(self, copy: GradientCopy) -> None:
        """Let the stream that computes wait for a copy, whose memory it may write from then on."""
        self._link.wait_event(copy.events[-1])  # the copies follow one another on one stream
        self._meter.add(BUFFERS, -copy.bytes)
        copy.total = None


def _leaving(chunk: Chunk) -> int:
    """Return the bytes of a chunk's sum if all of it leaves the device, else 0."""
    if not chunk.stage.shards_gradients or not all(part.in_pieces for part in chunk.slices):
        return 0
    return chunk.layout.shard * chunk.plan.reduce_dtype.itemsize


def _in_flight(place: torch.Tensor, tensor: nn.Parameter, event: torch.Event) -> torch.Tensor:
    """Return the gradient of an optimizer's tensor, which waits for a copy to pinned memory at its first use.

    Args:
        place: Pinned memory.
        tensor: Tensor of the optimizer.
        event: Event after the copy.
    """
    same = place.dtype == tensor.dtype
    gradient = place.detach() if same else torch.empty_like(place, dtype=tensor.dtype, pin_memory=False)
    size = gradient.untyped_storage().nbytes()
    if not same:
        # A thread that steps piece by piece needs one cast at a time. Code that reads all gradients needs all of them.
        gradient.untyped_storage().resize_(0)

    lock = Lock()  # the program and the step thread may both be the first to use the gradient

    def arrive() -> None:
        with lock:
            if gradient.__class__ is torch.Tensor:
                return
            event.synchronize()
            if not same:
                with without_torch_functions(), torch.no_grad():
                    gradient.untyped_storage().resize_(size)
                    gradient.copy_(place)
            gradient.__class__ = torch.Tensor  # last, because others may use the values from here on

    gradient.__class__ = GradientInFlight
    gradient.arrive = arrive  # type: ignore[attr-defined]
    return gradient


def _applied(tensor: nn.Parameter) -> torch.Tensor:
    """Return a stand-in for the gradient of an optimizer's tensor that a step within backward has used."""
    gradient = tensor.new_empty(()).expand_as(tensor)
    gradient.__class__ = GradientInFlight
    gradient.arrive = _refuse_read  # type: ignore[attr-defined]
    return gradient


def _refuse_read() -> NoReturn:
    # A norm or a clipped gradient would come too late, and without an error it would be ignored in silence.
    raise RuntimeError(
        "Offload(overlap='backward') has applied this gradient during backward, so nothing can read, clip or scale it; "
        "remove the code that does, or remove overlap"
    )
