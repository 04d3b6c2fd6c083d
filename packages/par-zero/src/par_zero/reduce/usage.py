"""The parameters that have a gradient for the optimizer, on this rank and on any rank."""

from collections.abc import Sequence
from itertools import chain, islice
from operator import or_

import torch

from .._collectives import Flags, largest_of
from .._torch_private import is_in_torch_func, without_torch_functions
from ..layout.chunk import Chunk
from ..layout.gradients import ChunkGradients
from ..layout.sharers import Sharers
from ..layout.stand_ins import Dropped, StandIns


class GradientUsage:
    """The chunk members that had a gradient since gradients were dropped, on this rank and on any rank.

    The ranks exchange one flag per pass: whether any rank had gradients of all members. If so, all ranks update all
    members. Only a rank without all gradients reads the flag, in the next step. If no rank had all gradients, the ranks
    exchange one flag per member.

    Args:
        gradients: Gradients of the trained chunks, by number of the chunk.
        sharers: Ranks that shard the chunks.

    Attributes:
        stand_ins: Stand-ins in the module's parameters for gradients that the optimizer holds.
    """

    def __init__(self, gradients: Sequence[ChunkGradients], sharers: Sharers) -> None:
        self._gradients, self._sharers = gradients, sharers
        self._sizes = [len(each.chunk.members) for each in gradients]
        self._anywhere = [[0] * size for size in self._sizes]
        self._here = [[0] * size for size in self._sizes]
        self._unshared: set[int] = set()  # chunks for which `_anywhere` holds only this rank's usage
        self._had_all = False  # whether this rank had gradients of all members in the latest pass that reduced
        # The flags of that pass: whether any rank had all gradients, and whether any rank requests an order.
        self._flags: Flags | None = None
        self.stand_ins = StandIns()

    @property
    def has_all(self) -> bool:
        """Whether all members have a gradient, as far as this rank knows."""
        return all(map(all, self._anywhere))

    def has_all_of(self, chunk: Chunk) -> bool:
        """Return whether this rank has gradients of all members of a chunk, so that no rank skips any of them."""
        return all(self._here[chunk.number])

    @property
    def device(self) -> torch.device:
        """Device of flags that the host reads."""
        return self._sharers.device_of_flags(self._gradients[0].chunk.device)

    def add(self, number: int, used: Sequence[int]) -> None:
        """Add the members of a chunk that had a gradient in the current pass on this rank.

        Args:
            number: Number of the chunk.
            used: Flags, one per member: 1 if the member had a gradient, else 0.
        """
        for flags in (self._anywhere, self._here):
            flags[number] = list(map(or_, flags[number], used))

    def begin_pass(self, arrived: torch.Tensor | None) -> None:
        """Remove the stand-ins, and drop the gradients that the caller has dropped since the last pass.

        Args:
            arrived: Parameter whose gradient has begun the pass. None: another event has begun it.
        """
        for dropped in self.stand_ins.take(arrived):
            self._drop(dropped)
        # A transform forbids writes to tensors from outside, and its pass brings no gradients of parameters.
        if not is_in_torch_func():
            self._clear_dropped()

    def end_pass(self, flags: Flags, *, had_all: bool) -> Flags | None:
        """Keep the flags of a pass that has reduced all chunks.

        Args:
            flags: Exchanged flags: whether any rank had all gradients, and whether any rank requests an order.
            had_all: Whether this rank had gradients of all members.

        Returns:
            The flags of the previous pass, which have arrived by now. None after the first pass.
        """
        before, self._flags = self._flags, flags
        self._had_all, self._unshared = had_all, set(range(len(self._gradients)))
        return before

    def bind(self, number: int) -> None:
        """Pass the gradients of a chunk to the optimizer, and put stand-ins into the module's parameters.

        Args:
            number: Number of the chunk.
        """
        gradients = self._gradients[number]
        gradients.bind()
        self.stand_ins.show(gradients.chunk, self._here[number])

    def unused(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Return, for each chunk, the members that had no gradient on any rank since gradients were dropped.

        All-reduces one int32 per member if no rank had gradients of all members.

        Args:
            chunks: Chunks.

        Returns:
            Lists of member indices, one list per chunk.
        """
        self.share()
        anywhere = (self._anywhere[chunk.number] for chunk in chunks)
        return [[] if all(used) else [index for index, each in enumerate(used) if not each] for used in anywhere]

    def share(self) -> None:
        """Find the members that had a gradient on any rank, in the latest pass that reduced or before."""
        if not self._unshared or self._flags is None:
            return
        # All ranks take the same branch: if this rank had all gradients, the flag is set on every rank. The first
        # condition avoids the read, which waits for the device.
        if self._had_all or self._flags.read()[0]:
            for number in self._unshared:
                self._anywhere[number] = [1] * self._sizes[number]
        else:
            used = iter(largest_of(list(chain(*self._anywhere)), self._sharers.agreeing, self.device))
            self._anywhere = [list(islice(used, size)) for size in self._sizes]
        self._unshared.clear()

    def look_before_step(self, chunks: Sequence[Chunk]) -> None:
        """Check the gradients of chunks before a step, and drop the gradients that the caller has set to None.

        Args:
            chunks: Chunks that the optimizer updates.

        Raises:
            RuntimeError: The caller has assigned a gradient to a parameter, or gradients are not reduced yet.
        """
        for chunk in chunks:
            dropped = self.stand_ins.dropped_before_step(chunk)
            if dropped is not None:
                self._drop(dropped)
            if self._gradients[chunk.number].waits_for_sum:
                raise RuntimeError(
                    f"gradients of {chunk.members[0].names[0]!r} and others wait for their sum over the ranks, as the "
                    "latest backward pass was within no_sync(); leave no_sync() before the last backward of a step"
                )

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drop the unreduced gradients of chunks, and the usage of their members.

        Args:
            chunks: Chunks.
        """
        with without_torch_functions():  # faster if parameters are in flight
            for chunk in chunks:
                self._gradients[chunk.number].forget()
        for chunk in chunks:
            self.stand_ins.forget(chunk)
            self._clear_shared(chunk.number)

    def _drop(self, dropped: Dropped) -> None:
        """Drop the optimizer's gradients that the caller has dropped in the module."""
        number = dropped.chunk.number
        if not dropped.others:
            self._gradients[number].drop_reduced()
            self._clear_shared(number)
            return
        self.share()  # first, because it adds the usage of the previous pass, which must not set these members again
        self._gradients[number].drop_members(dropped.members)
        for index in dropped.members:
            self._anywhere[number][index] = self._here[number][index] = 0

    def _clear_dropped(self) -> None:
        """Clear the usage of chunks whose gradients the caller has dropped in the optimizer's tensors."""
        gone: dict[int, bool] = {}  # by optimizer: whether all of its gradients on this rank were dropped
        for each in self._gradients:
            if each.is_stepped_here:
                gone[each.chunk.plan.owner] = gone.get(each.chunk.plan.owner, True) and each.is_empty
        for number, each in enumerate(self._gradients):
            # A rank may hold no part of a small chunk, and still be the only one whose data has used its members.
            if each.is_empty and (each.is_stepped_here or gone.get(each.chunk.plan.owner, False)):
                self._clear(number)

    def _clear_shared(self, number: int) -> None:
        self._clear(number)
        self._unshared.discard(number)

    def _clear(self, number: int) -> None:
        for flags in (self._anywhere, self._here):
            flags[number] = [0] * self._sizes[number]
