"""Which parameters have a gradient that the optimizer may step by, on this rank and on any rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._collectives import Flags, all_reduce
from .._torch_private import is_in_torch_func, without_torch_functions
from ..layout.chunk import Chunk
from ..layout.gradients import ChunkGradients
from ..layout.sharers import Sharers
from ..layout.stand_ins import Dropped, StandIns


class GradientUsage:
    """Which members of chunks had a gradient since gradients were dropped, on this rank and on any rank.

    The ranks exchange one flag per pass: whether a rank had gradients of all members, which then all ranks step by. The
    flag is read in the next step, and only by ranks that did not have all. Without such a rank, the ranks exchange a
    flag per member.

    Args:
        gradients: The gradients of the trained chunks, by number of the chunk.
        sharers: The ranks that take part.

    Attributes:
        stand_ins: The stand-ins in the module's parameters for gradients that the optimizer holds.
    """

    def __init__(self, gradients: Sequence[ChunkGradients], sharers: Sharers) -> None:
        self._gradients, self._sharers = gradients, sharers
        self._sizes = [len(each.chunk.members) for each in gradients]
        self._anywhere = [torch.zeros(size, dtype=torch.int32) for size in self._sizes]
        self._here = [[0] * size for size in self._sizes]
        self._unshared: set[int] = set()  # the chunks of which `anywhere` says what this rank had
        self._had_all = False  # whether this rank had gradients of all members in the latest pass that reduced
        self._flags: Flags | None = None  # of that pass: whether any rank had, and whether any requests an order
        self.stand_ins = StandIns()

    @property
    def has_all(self) -> bool:
        """Whether all members have a gradient, as far as this rank knows."""
        return all(bool(used.all()) for used in self._anywhere)

    @property
    def device(self) -> torch.device:
        """Device of flags that the host reads."""
        return self._sharers.device_of_flags(self._gradients[0].chunk.own.device)

    def add(self, number: int, used: Sequence[int]) -> None:
        """Add the members of a chunk that had a gradient in the pass under way on this rank.

        Args:
            number: Number of the chunk.
            used: For each member 1 if it had a gradient, else 0.
        """
        self._anywhere[number] |= torch.tensor(used, dtype=torch.int32)
        self._here[number] = [old | new for old, new in zip(self._here[number], used, strict=True)]

    def begin_pass(self, arrived: torch.Tensor | None) -> None:
        """Take the stand-ins away, and drop the gradients whose stand-ins the program has taken away before.

        Args:
            arrived: The parameter whose gradient has begun the pass, if one has.
        """
        for dropped in self.stand_ins.take(arrived):
            self._drop(dropped)
        # A transform forbids writes to tensors from outside, and its pass brings no gradients of parameters.
        if not is_in_torch_func():
            self._clear_dropped()

    def end_pass(self, flags: Flags, *, had_all: bool) -> Flags | None:
        """Keep the flags of a pass that has reduced all chunks.

        Args:
            flags: The flags that the ranks exchange: whether any had all gradients, and whether any requests an order.
            had_all: Whether this rank had gradients of all members.

        Returns:
            The flags of the pass before, which have long arrived; None after the first pass.
        """
        before, self._flags = self._flags, flags
        self._had_all, self._unshared = had_all, set(range(len(self._gradients)))
        return before

    def bind(self, number: int) -> None:
        """Show the optimizer the gradients of a chunk, and the program that there are such."""
        gradients = self._gradients[number]
        gradients.bind()
        self.stand_ins.show(gradients.chunk, self._here[number])

    def unused(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Return for each chunk the members that had no gradient on any rank since gradients were dropped.

        An all-reduce of an int32 per member, if no rank had gradients of all.
        """
        self.share()
        return [(self._anywhere[chunk.number] == 0).nonzero().flatten().tolist() for chunk in chunks]

    def share(self) -> None:
        """Find the members that had a gradient on any rank, in the latest pass that reduced or before."""
        if not self._unshared or self._flags is None:
            return
        if self._had_all or self._flags.read()[0]:  # the same on all ranks
            for number in self._unshared:
                self._anywhere[number].fill_(1)
        else:
            used = torch.cat(self._anywhere).to(self.device)
            for group in self._sharers.agreeing:
                all_reduce(used, group, dist.ReduceOp.MAX).wait()
            self._anywhere = list(used.cpu().split(self._sizes))
        self._unshared.clear()

    def look_before_step(self, chunks: Sequence[Chunk]) -> None:
        """Check that the gradients of chunks are those to step by, and drop what the program has dropped of them.

        Raises:
            RuntimeError: The program has set the gradient of a parameter, or gradients are not reduced yet.
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
        """Drop the gradients of chunks that are not reduced, and which of their members had any."""
        with without_torch_functions():  # quicker, where parameters are in flight
            for chunk in chunks:
                self._gradients[chunk.number].forget()
        for chunk in chunks:
            self.stand_ins.forget(chunk)
            self._clear_shared(chunk.number)

    def _drop(self, dropped: Dropped) -> None:
        """Drop gradients that the optimizer holds, as the program has dropped them in the module."""
        number = dropped.chunk.number
        if not dropped.others:
            self._gradients[number].drop_reduced()
            self._clear_shared(number)
            return
        self.share()  # first, since it reports the pass before
        self._gradients[number].drop_members(dropped.members)
        self._anywhere[number][dropped.members] = 0
        for index in dropped.members:
            self._here[number][index] = 0

    def _clear_dropped(self) -> None:
        """Clear the usage of chunks whose gradients the program has dropped in the optimizer's tensors."""
        gone: dict[int, bool] = {}  # by optimizer
        for each in self._gradients:
            if each.is_stepped_here:
                gone[each.chunk.owner] = gone.get(each.chunk.owner, True) and each.is_empty
        for number, each in enumerate(self._gradients):
            # A rank may hold no part of a small chunk, and still be the only one whose data has used its members.
            if each.is_empty and (each.is_stepped_here or gone.get(each.chunk.owner, False)):
                self._clear(number)

    def _clear_shared(self, number: int) -> None:
        self._clear(number)
        self._unshared.discard(number)

    def _clear(self, number: int) -> None:
        self._anywhere[number].zero_()
        self._here[number] = [0] * self._sizes[number]
