"""Orders that all ranks follow: learned from the first rank, and learned again when they have changed."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .._collectives import all_reduce


class LearnedOrder:
    """An order of numbers that all ranks follow: the first rank's in an earlier pass.

    Args:
        numbers: The numbers, such as those of chunks, in the order to follow until one is learned.

    Attributes:
        numbers: The numbers in the order that all ranks follow.
        observed: The numbers that this pass has brought so far, in their order. The owner appends to it and clears it.
        is_agreed: Whether `numbers` was learned, or no rank has requested another order in the first pass.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)
        self.observed: list[int] = []
        self.is_agreed = False
        self._previous: list[int] | None = None  # the order of the pass before
        self._requested: list[int] | None = None  # the last order that this rank requested

    def end_pass(self) -> bool:
        """Return whether this rank requests to learn the order: in the first pass, or after two passes in a new order.

        Numbers that the pass has not brought follow the observed ones, in the order of before.
        """
        if not self.observed:
            return False
        if self.observed == self.numbers:
            self._previous = self.numbers
            return False
        known = dict.fromkeys(self.observed)
        before, self._previous = self._previous, [*known, *(number for number in self.numbers if number not in known)]
        # A program that alternates between orders would otherwise have the ranks learn one in every pass.
        if self._previous in (self.numbers, self._requested) or before not in (None, self._previous):
            return False
        self._requested = self._previous
        return True

    @property
    def latest(self) -> list[int]:
        """The order of the latest pass."""
        return self._previous or self.numbers


def learn_orders(orders: Sequence[LearnedOrder], groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Take the lowest rank's latest orders as those of all ranks. An all-reduce of one int64 per number.

    Args:
        orders: The orders, the same on all ranks.
        groups: The groups over which the ranks agree, one after the other.
        device: Device of the all-reduced numbers.
    """
    lengths = [len(order.numbers) for order in orders]
    latest = torch.tensor([number for order in orders for number in order.latest], dtype=torch.int64)
    # The lowest rank adds the largest multiple, so its numbers are the maxima over any chain of groups that overlap.
    # Broadcasts would not do: each group has a first rank of its own.
    ahead = dist.get_world_size() - 1 - dist.get_rank()
    ranked = (latest + ahead * max(lengths)).to(device)
    for group in groups:
        all_reduce(ranked, group, dist.ReduceOp.MAX).wait()
    for order, numbers in zip(orders, (ranked % max(lengths)).split(lengths), strict=True):
        order.numbers = numbers.tolist()
