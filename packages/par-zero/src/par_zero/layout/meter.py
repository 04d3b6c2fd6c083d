"""Record of the actions of a step, and of the bytes of gathered parameters, gradients and buffers, with their peak."""

from collections.abc import Mapping

UNITS, GRADIENTS, BUFFERS = "units", "gradients", "buffers"
"""Kinds of memory that change within a step: gathered parameters, gradients, and buffers that chunks borrow."""

MOST_ACTIONS = 50_000
"""Largest number of actions that are kept of a step. A long evaluation belongs to the step after it."""


class Meter:
    """Counter of bytes as memory is allocated and freed, and list of actions. Each call costs a few integer operations.

    Attributes:
        done: Actions of the latest step, in their order; empty if there were more than `MOST_ACTIONS`.
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys((UNITS, GRADIENTS, BUFFERS), 0)
        self._total = 0
        self._passed = False  # whether a backward pass has ended since the latest step
        self._latest = (0, dict(self._now))  # peak bytes of the latest step, in total and by kind
        self._done: list[tuple[str, str]] = []
        self.done: list[tuple[str, str]] = []
        self._mark_peak()

    def note(self, op: str, of: str = "") -> None:
        """Record an action: see `par_zero.programs.ledger`.

        Args:
            op: Kind of the action.
            of: Name of the unit or chunk.
        """
        # One more than are kept tells that some are missing.
        if len(self._done) <= MOST_ACTIONS:
            self._done.append((op, of))

    def forget(self) -> None:
        """Discard the actions and the peak of the step under way, because a pass failed."""
        self._done.clear()
        self._mark_peak()

    @property
    def now(self) -> Mapping[str, int]:
        """Current bytes by kind."""
        return self._now

    def _mark_peak(self) -> None:
        self._most, self._fullest = self._total, dict(self._now)

    def add(self, kind: str, size: int) -> None:
        """Count memory that is allocated or freed.

        Args:
            kind: Kind of the memory.
            size: Number of bytes; negative if the memory is freed.
        """
        self._now[kind] += size
        self._total += size
        if self._total > self._most:
            self._mark_peak()

    def touch(self, kind: str, size: int) -> None:
        """Count memory that is allocated and freed at once, which can only raise the peak."""
        self.add(kind, size)
        self.add(kind, -size)

    def end_pass(self, *, reduced: bool) -> None:
        """Record that a backward pass has ended, with gradients reduced or not, after all that was done for it."""
        self._passed |= reduced
        self.note("E")

    def end_step(self) -> bool:
        """Note the step of an optimizer. Without a backward pass since another optimizer's step, both are one step.

        Returns:
            Whether this was the first optimizer of its step.
        """
        first = self._passed
        # A further optimizer of the same step may raise the peak, and must not lower it.
        if self._passed or self._most > self._latest[0]:
            self._latest = self._most, self._fullest
        # Actions of a further optimizer belong to the same step, so they are appended.
        done = self._done if self._passed else [*self.done, *self._done]
        self.done = done if len(done) <= MOST_ACTIONS else []
        self._done = []
        self._passed = False
        self._mark_peak()
        return first

    @property
    def fullest(self) -> Mapping[str, int]:
        """Bytes by kind at the peak of the latest step; before the first step, at the peak so far."""
        return self._latest[1] if self._latest[0] else self._fullest
