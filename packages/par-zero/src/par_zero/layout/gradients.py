"""Gradients of a chunk, from autograd to the optimizer.

- Backward: autograd sets them in the parameters, and `take` moves them into a flat buffer.
- Reduce: the reduction writes this rank's shard of the sum over the ranks to `place_of_sum`. `take_sum` keeps it, and
  `offload` sends it to its tier.
- Step: `bind` passes it to the optimizer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress
from typing import Protocol

import torch
from torch import nn

from par_groups import attributes

from .._torch_private import foreach_add_, foreach_copy_, without_torch_functions
from .buffers import Buffers
from .chunk import Chunk, Slice
from .meter import BUFFERS, GRADIENTS


class GradientStore(Protocol):
    """Store of reduced gradients outside of memory."""

    @property
    def chunks(self) -> Iterable[Chunk]:
        """Chunks whose gradients it keeps."""

    def add_earlier_(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Add the gradients that the optimizer holds of a chunk to this rank's shard of the sum."""

    def write(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Begin to write this rank's shard of a chunk's sum. `total` may be reused after `bind`, or earlier."""

    def bind(self, chunk: Chunk) -> bool:
        """Show the optimizer its gradients, when they are written. Return whether it can keep later ones, too."""


class ChunkGradients:
    """Gradients of a chunk.

    Args:
        chunk: Chunk.

    Attributes:
        chunk: Chunk.
        buffer: (size) This rank's gradients, from the first of a pass on. If gradients are sharded, their reduction
            returns it to its pool; otherwise the chunk keeps it.
        store: Store of the reduced gradients; None: memory.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.buffer: torch.Tensor | None = None
        self.store: GradientStore | None = None
        self._places: list[torch.Tensor] = []  # of the members in the last buffer, which may be lent again
        self._filled = False  # whether `buffer` holds gradients of this rank that are not reduced yet
        self._adds_stored = False  # whether earlier results in `store` are to be added to the sum
        self._earlier: torch.Tensor | None = None  # this rank's shard of earlier results in memory, to be added
        self._shard: torch.Tensor | None = None  # memory for this rank's shard of the sum, if it is not in `buffer`
        self._reduced: torch.Tensor | None = None  # elements `updated` of the sum, until the optimizer has them
        self._is_stored = False  # whether the latest sum is in `store`, and the optimizer does not have it yet
        self._cast_bytes = 0  # of gradients in memory of the optimizer's own: see `is_cast`

    @property
    def waits_for_sum(self) -> bool:
        """Whether there are gradients of this rank that are not reduced yet."""
        return self._filled

    @property
    def is_empty(self) -> bool:
        """Whether neither this rank has gradients that are not reduced, nor the optimizer has any."""
        return not self._filled and all(tensor.grad is None for tensor in self._stepped)

    @property
    def is_stepped_here(self) -> bool:
        """Whether an optimizer of this rank holds any part of the chunk; a small chunk is padding on some ranks."""
        return bool(self._stepped)

    @property
    def has_earlier(self) -> bool:
        """Whether the results of earlier reductions are still to be added to the sum."""
        return self._earlier is not None or self._adds_stored

    @property
    def has_memory(self) -> bool:
        """Whether they have memory between passes: for all of them, or for this rank's shard of their sum."""
        return (self._shard if self.chunk.stage.shards_gradients else self.buffer) is not None

    @property
    def borrowed(self) -> int:
        """Bytes of the buffer that is lent for them, if gradients are sharded."""
        if self.buffer is None or not self.chunk.stage.shards_gradients:
            return 0
        return self.buffer.untyped_storage().nbytes()

    @property
    def is_cast(self) -> bool:
        """Whether the optimizer has them in memory of its own: in another dtype, or as assembled tensors."""
        return self._cast_bytes > 0

    @property
    def _stepped(self) -> list[nn.Parameter]:
        """Tensors of the optimizer that hold the chunk."""
        return [*(part.tensor for part in self.chunk.slices), *self.chunk.wholes]

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield the memory that they take once they were moved: its kind, a tensor in it, its tier. Not of `store`."""
        if self.buffer is not None:
            yield (BUFFERS if self.chunk.stage.shards_gradients else GRADIENTS), self.buffer, "device"
        here = [*(part.tensor for part in self.chunk.slices if not self._in_store(part)), *self.chunk.wholes]
        kept = [*(tensor.grad for tensor in here), self._shard, self._earlier, self._reduced]
        # A rank whose shard is padding alone writes nothing to a disk, and keeps it in memory.
        tier = "host" if self.store is None and self.chunk.home.gradients == "host" else "device"
        yield from ((GRADIENTS, tensor, tier) for tensor in kept if tensor is not None)

    def take(self, buffers: Buffers) -> list[int]:
        """Move the members' gradients into `buffer`: by copy the first time, then by addition.

        Args:
            buffers: Lends `buffer`, if gradients are sharded.

        Returns:
            1 for each member that had a gradient, else 0.
        """
        chunk = self.chunk
        buffer = self._borrow(buffers)
        # The first gradients overwrite the buffer. The sum may be written where the optimizer still reads earlier
        # results, so these are kept aside until it is there.
        if not self._filled:
            self._earlier = self._copy_earlier()
            self._adds_stored = any(part.tensor.grad is not None and self._in_store(part) for part in chunk.slices)
        # Freed parameters have a `__torch_function__`, which would run once per parameter.
        with without_torch_functions():
            gradients = [parameter.grad for parameter in chunk.parameters]
        used = [int(gradient is not None) for gradient in gradients]
        into, given = self._places, [gradient for gradient in gradients if gradient is not None]
        if len(given) < len(used):
            into = list(compress(into, used))
        chunk.meter.note("C" if given else "zero", chunk.name)
        if given:
            chunk.meter.touch(GRADIENTS, chunk.plan.arriving)
        if not self._filled and len(given) < len(used):
            # Members without a gradient must add zeros to the sum, but a lent buffer contains old values.
            buffer.zero_()
        if given:
            (foreach_add_ if self._filled else foreach_copy_)(into, given)
        self._filled = True
        with without_torch_functions():
            for parameter in chunk.parameters:
                parameter.grad = None
        return used

    def place_of_sum(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the memory for this rank's shard of the sum over the ranks.

        Args:
            buffer: (size) The buffer of all gradients, of which the shard is a part unless gradients are sharded.
        """
        chunk = self.chunk
        if not chunk.stage.shards_gradients:
            return chunk.share_in(buffer)
        if self._shard is None:
            low, high = chunk.share
            self._shard = torch.empty(high - low, dtype=chunk.plan.reduce_dtype, device=chunk.device)
            attributes.LABEL.set(self._shard, chunk.label)
            if chunk.home.gradients != "host":
                chunk.meter.add(GRADIENTS, self._shard.nbytes)
        return self._shard

    def take_sum(self, shard: torch.Tensor, buffers: Buffers) -> None:
        """Keep the sum for the optimizer, and return the buffer if gradients are sharded.

        Args:
            shard: This rank's shard of the sum, in `place_of_sum`.
            buffers: Pool that has lent `buffer`.
        """
        self._reduced = shard if self.chunk.stage.shards_state else self.buffer
        self._filled = False
        if self.chunk.stage.shards_gradients and self.buffer is not None:
            buffers.give_back(self.buffer)
            self.buffer = None

    def add_earlier_(self, shard: torch.Tensor) -> None:
        """Add the results of earlier reductions to this rank's shard of the sum."""
        if self._earlier is not None:
            shard.add_(self._earlier)
            self._earlier = None
        if self.store is not None and self._adds_stored:
            self.store.add_earlier_(self.chunk, shard)
            self._adds_stored = False

    def offload(self) -> None:
        """Begin to write the sum to `store`, if there is one, and free its memory."""
        if self.store is None or self._reduced is None:
            return
        # Elements that are stepped on the device keep the sum there, and so do stages 0 and 1 in the chunk's buffer.
        leaves = all(self._in_store(part) for part in self.chunk.slices)
        if leaves and self._shard is not None:
            # The store counts the memory from here on, until its copy or write ends.
            self.chunk.meter.add(GRADIENTS, -self._shard.nbytes)
            self.chunk.meter.note("send", self.chunk.name)
        self.store.write(self.chunk, self._reduced)
        self._is_stored = True
        if leaves:
            self._shard = self._reduced = None

    def bind(self) -> None:
        """Show the optimizer its gradients, in its own dtype."""
        chunk = self.chunk
        if self.store is not None and self._is_stored:
            self._is_stored = False
            # After a failed write, gradients stay in memory from the next pass on.
            if not self.store.bind(chunk):
                self.store, chunk.home = None, replace(chunk.home, gradients="device")
        if self._reduced is None or chunk.plan.assembled:
            return
        origin, _ = chunk.updated
        here = [part for part in chunk.slices if not self._in_store(part)]
        for part in here:
            view = self._reduced[part.start - origin : part.stop - origin].view(part.tensor.shape)
            # A tensor that accepts gradients of any dtype takes the sum as it is: somebody adds to it before the step.
            dtype = getattr(part.tensor, "grad_dtype", part.tensor.dtype) or view.dtype
            part.tensor.grad = view if view.dtype == dtype else view.to(dtype)
        if chunk.plan.reduce_dtype != chunk.master.dtype:
            self._count_cast(sum(part.tensor.nbytes for part in here))
        # From now on only the optimizer refers to the sum, so that `zero_grad` frees it.
        self._reduced = None

    def pop_sum(self) -> torch.Tensor:
        """Return elements `updated` of the sum over the ranks, and keep it no longer.

        Raises:
            RuntimeError: There is no sum, because no reduction was made since the last call.
        """
        if self._reduced is None:
            raise RuntimeError(f"chunk {self.chunk.number} has no sum of gradients to put together; a bug of par-zero")
        total, self._reduced = self._reduced, None
        return total

    def count_assembled(self) -> None:
        """Count the gradients of the tensors that this rank steps, which were assembled from the sums of all ranks."""
        self._count_cast(sum(whole.nbytes for whole in self.chunk.wholes))

    def drop_reduced(self) -> None:
        """Drop the gradients that the optimizer holds."""
        for tensor in self._stepped:
            tensor.grad = None
        self._count_cast(0)

    def drop_members(self, members: Iterable[int]) -> None:
        """Drop the gradients of some members that the optimizer holds.

        Raises:
            RuntimeError: They are stored together with other members' gradients outside of memory, or on other ranks.
        """
        chunk = self.chunk
        for index in members:
            if self.store is not None or chunk.plan.assembled:
                raise RuntimeError(
                    f"the gradient of {chunk.members[index].names[0]!r} was set to None, and those of other parameters "
                    "that travel with it were not; set all to None, or use optimizer.zero_grad()"
                )
            start, stop = chunk.layout.slots[index]
            for part in chunk.slices:
                low, high = max(start, part.start), min(stop, part.stop)
                if part.tensor.grad is None or low >= high:
                    continue
                # A flat slice also holds the gradients of other members, so only a part of it can be dropped.
                if chunk.layout.atomic:
                    part.tensor.grad = None
                else:
                    part.tensor.grad[low - part.start : high - part.start].zero_()

    def forget(self) -> None:
        """Drop gradients that are not reduced."""
        self._filled, self._earlier, self._adds_stored, self._is_stored = False, None, False, False
        self._reduced = None
        self._count_cast(0)
        for parameter in self.chunk.parameters:
            parameter.grad = None

    def forget_buffer(self) -> None:
        """Release the memory of a returned buffer, which the places of the members would keep alive."""
        if self.buffer is None:
            self._places = []

    def _borrow(self, buffers: Buffers) -> torch.Tensor:
        """Return `buffer`, with zeros in its padding."""
        chunk = self.chunk
        if self.buffer is None:
            size, device = chunk.layout.size, chunk.device
            if chunk.stage.shards_gradients:
                # Sharded gradients need the buffer only until their reduction, so a pool lends it to one chunk after
                # another.
                self.buffer = buffers.take(size, chunk.plan.reduce_dtype, device)
            else:
                self.buffer = torch.empty(size, dtype=chunk.plan.reduce_dtype, device=device)
                chunk.meter.add(GRADIENTS, self.buffer.nbytes)
            attributes.LABEL.set(self.buffer, chunk.label)
            # The reduction sums padding as well, and old values in a lent buffer could be NaN.
            for start, stop in chunk.layout.gaps:
                self.buffer[start:stop].zero_()
            # The views take one call per parameter, and stay valid while the pool lends the same memory.
            if not self._places or self._places[0].untyped_storage().data_ptr() != self.buffer.data_ptr():
                self._places = list(chunk.views(self.buffer))
        return self.buffer

    def _copy_earlier(self) -> torch.Tensor | None:
        """Copy this rank's shard of what the optimizer still holds of earlier reductions in memory; None: nothing."""
        chunk = self.chunk
        if self._reduced is not None:  # an assembled chunk that is reduced twice in a pass
            return chunk.share_in(self._reduced).clone() if not chunk.stage.shards_state else self._reduced.clone()
        held = [part for part in chunk.slices if part.tensor.grad is not None and not self._in_store(part)]
        if not held:
            return None
        low, high = chunk.share
        earlier = torch.zeros(high - low, dtype=chunk.plan.reduce_dtype, device=chunk.device)
        for part in held:
            start, stop = max(part.start, low), min(part.stop, high)
            if part.tensor.grad is not None and start < stop:
                earlier[start - low : stop - low] = part.tensor.grad.view(-1)[start - part.start : stop - part.start]
        return earlier

    def _in_store(self, part: Slice) -> bool:
        """Return whether the gradient of a slice is in `store`."""
        return self.store is not None and part.in_pieces

    def _count_cast(self, size: int) -> None:
        """Count that many bytes of gradients in memory of the optimizer's own from now on."""
        if self.chunk.home.gradients == "device" and size != self._cast_bytes:
            self.chunk.meter.add(GRADIENTS, size - self._cast_bytes)
            self.chunk.meter.note("cast" if size else "drop", self.chunk.name)
        self._cast_bytes = size
