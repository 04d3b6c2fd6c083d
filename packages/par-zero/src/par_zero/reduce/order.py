"""Orders that all ranks follow. The ranks learn an order from the lowest rank, and learn it again when it changes."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .._collectives import all_reduce


class LearnedOrder:
    """An order of numbers that all ranks follow: the lowest rank's order in an earlier pass.

    Args:
        numbers: Numbers, such as chunk numbers, in the order to follow until the ranks learn an order.

    Attributes:
        numbers: Numbers, in the order that all ranks follow.
        observed: Numbers of the current pass so far, in order. The owner of this object appends to the list and clears
            it.
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

        Numbers that this pass has not observed follow the observed numbers, in the previous order.
        """
        if not self.observed:
            return False
        if self.observed == self.numbers:
            self._previous = self.numbers
            return False
        known = dict.fromkeys(self.observed)
        before, self._previous = self._previous, [*known, *(number for number in self.numbers if number not in known)]
        # Two equal passes are needed, because a loop that alternates between two orders would make the ranks learn an
        # order in every pass.
        if self._previous in (self.numbers, self._requested) or before not in (None, self._previous):
            return False
        self._requested = self._previous
        return True

    @property
    def latest(self) -> list[int]:
        """Numbers in the order of the latest pass."""
        return self._previous or self.numbers


def learn_orders(orders: Sequence[LearnedOrder], groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Set the orders of all ranks to the lowest rank's latest orders. All-reduces one int64 per number.

    Args:
        orders: Orders, for the same purposes on all ranks.
        groups: Process groups over which the ranks agree, one after the other.
        device: Device of the all-reduced numbers.
    """
    lengths = [len(order.numbers) for order in orders]
    latest = torch.tensor([number for order in orders for number in order.latest], dtype=torch.int64)
    # The lowest rank adds the largest multiple, so its numbers are the maxima over any chain of groups that overlap.
    # Broadcasts would not work, because each group has another first rank.
    ahead = dist.get_world_size() - 1 - dist.get_rank()
    ranked = (latest + ahead * max(lengths)).to(device)
    for group in groups:
        all_reduce(ranked, group, dist.ReduceOp.MAX).wait()
    for order, numbers in zip(orders, (ranked % max(lengths)).split(lengths), strict=True):
        order.numbers = numbers.tolist()
