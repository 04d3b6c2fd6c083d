"""The order of reductions, from a program or learned from the lowest rank, and learned again when it changes."""

from collections.abc import Collection, Container, Iterable, Sequence

import torch
import torch.distributed as dist

from .._collectives import largest_of


class LearnedOrder:
    """An order of numbers that all ranks follow: the lowest rank's order in an earlier pass.

    Args:
        numbers: Numbers, such as chunk numbers, in the order to follow until the ranks learn an order. Each number that
            can occur, once.
        repeats: Whether a pass may observe a number several times, or omit it. Default: numbers that a pass has not
            observed follow the observed numbers, in the previous order.

    Attributes:
        numbers: Numbers, in the order that all ranks follow.
        observed: Numbers of the current pass so far, in order. The owner of this object appends to the list and clears
            it.
        is_agreed: Whether `numbers` was learned, or no rank has requested another order in the first pass.
    """

    def __init__(self, numbers: Iterable[int], *, repeats: bool = False) -> None:
        self.numbers = list(numbers)
        self.observed: list[int] = []
        self.is_agreed = False
        self._repeats, self._base = repeats, max(self.numbers, default=0) + 2
        self._previous: list[int] | None = None  # the order of the pass before
        self._requested: list[int] | None = None  # the last order that this rank requested

    def end_pass(self) -> bool:
        """Return whether this rank requests to learn the order: in the first pass, or after two equal new ones."""
        if not self.observed:
            return False
        if self.observed == self.numbers:
            self._previous = self.numbers
            return False
        before, self._previous = self._previous, list(self.observed)
        if not self._repeats:
            self._previous = list(dict.fromkeys([*self.observed, *self.numbers]))
        # Two equal passes are needed, because a loop that alternates between two orders would make the ranks learn an
        # order in every pass.
        if self._previous in (self.numbers, self._requested) or before not in (None, self._previous):
            return False
        self._requested = self._previous
        return True

    def learn(self, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        """Set the order to the lowest rank's latest order. All-reduces one int64 per number, and one for their count.

        Args:
            groups: Process groups over which the ranks agree, one after the other.
            device: Device of the all-reduced numbers.
        """
        latest, groups = self._previous or self.numbers, tuple(groups)
        length = len(latest)
        if self._repeats:
            (length,) = largest_of([length], groups, device)
        # Zero is padding. The lowest rank adds the largest multiple, so its numbers are the maxima over any chain of
        # groups that overlap. Broadcasts would not work, because each group has another first rank.
        padded = [number + 1 for number in latest] + [0] * (length - len(latest))
        ahead = (dist.get_world_size() - 1 - dist.get_rank()) * self._base
        ranked = largest_of([number + ahead for number in padded], groups, device, torch.int64)
        self.numbers = [number % self._base - 1 for number in ranked if number % self._base]


class ReductionOrder:
    """The order in which a rank begins the reductions of a pass, and the chunks that are due. Chunks have numbers.

    Args:
        count: Number of chunks, in the order in which their gradients are expected in the first pass.
        follows_program: Whether a program gives the order. If not, the ranks learn it.

    Attributes:
        numbers: All chunks in the order of their reductions in this pass, equal on all ranks.
        due: Chunks that are due. They stay so until a pass reduces them.
        early: Chunks that the program reduces next, which may begin before their place. None: all.
        learned: Order that holds if no program decides.
        source: Order that the ranks learn from each other; None: they learn none.
    """

    def __init__(self, count: int, *, follows_program: bool) -> None:
        self._follows_program = follows_program
        self.learned = LearnedOrder(range(count))
        self.source: LearnedOrder | None = None if follows_program else self.learned
        self.numbers: Sequence[int] = self.learned.numbers
        self.due: dict[int, None] = {}
        self.early: Sequence[int] | None = ()

    def learn(self, order: LearnedOrder) -> None:
        """Let the ranks learn another order instead of the order of reductions, which follows from it: see `arrange`.

        Args:
            order: Order that the caller observes and follows.
        """
        self.source = order

    def arrange(self, numbers: list[int]) -> None:
        """Set the order from the next pass on.

        Args:
            numbers: All chunks, in the same order on all ranks.
        """
        self.learned.numbers = numbers
        self.follow(())

    def expect_last(self, numbers: Container[int]) -> None:
        """Reduce some chunks last if no program decides.

        Args:
            numbers: Chunks such as those of the root, whose parameters any code may use.
        """
        self.learned.numbers.sort(key=numbers.__contains__)
        self.follow(())

    def follow(self, numbers: Iterable[int]) -> None:
        """Set the order in the pass that begins.

        Args:
            numbers: Chunks in the order of a program. All other chunks follow. Empty: no program exists.
        """
        first = dict.fromkeys(numbers if self._follows_program else ())
        self.numbers = [*first, *(number for number in self.learned.numbers if number not in first)]
        self.due, self.early = {}, ()

    def hold(self, begun: Collection[int]) -> None:
        """Leave due only the chunks that have begun."""
        self.due = dict.fromkeys(number for number in self.due if number in begun)

    def count_due(self) -> int:
        """Return how many chunks are due, from the first in the order."""
        if len(self.due) >= len(self.numbers):
            return len(self.numbers)
        return next(place for place, number in enumerate(self.numbers) if number not in self.due)

    def may_begin_early(self, number: int) -> bool:
        """Return whether a complete chunk may begin before its place in the program."""
        return self.early is None or number in self.early
