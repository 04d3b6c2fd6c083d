"""What is done in a step, and how many bytes of what comes and goes there are, now and at the fullest moment."""

from collections.abc import Mapping

UNITS, GRADIENTS, BUFFERS = "units", "gradients", "buffers"
"""What comes and goes: gathered parameters, gradients, and memory that chunks lend each other."""


class Meter:
    """Adds up bytes as memory is taken and given back, and lists what is done; a few integers each time.

    Attributes:
        done: What was done in the latest step, in its order.
    """

    def __init__(self) -> None:
        self._now = dict.fromkeys((UNITS, GRADIENTS, BUFFERS), 0)
        self._total = 0
        self._passed = False  # whether a backward pass has ended since the latest step
        self._latest = (0, dict(self._now))  # of the latest step: the most bytes in all, and of what they were
        self._done: list[tuple[str, str]] = []
        self.done: list[tuple[str, str]] = []
        self._note()

    def note(self, op: str, of: str = "") -> None:
        """Records that something was done, or has come: see `par_zero.programs.entries`.

        Args:
            op: What.
            of: The unit or chunk.
        """
        self._done.append((op, of))

    def forget(self) -> None:
        """Forgets what was done in the step under way, and its fullest moment, as a pass has failed."""
        self._done.clear()
        self._note()

    @property
    def now(self) -> Mapping[str, int]:
        """Bytes by kind now."""
        return self._now

    def _note(self) -> None:
        self._most, self._fullest = self._total, dict(self._now)

    def add(self, kind: str, size: int) -> None:
        """Memory is taken, or given back.

        Args:
            kind: What it is for.
            size: Its bytes, below 0 if it is given back.
        """
        self._now[kind] += size
        self._total += size
        if self._total > self._most:
            self._note()

    def touch(self, kind: str, size: int) -> None:
        """Memory is taken, and given back at once."""
        self.add(kind, size)
        self.add(kind, -size)

    def end_pass(self, *, reduced: bool) -> None:
        """A backward pass has ended, with gradients reduced or not."""
        self._passed |= reduced

    def note_end(self, *, reduced: bool = False) -> None:  # noqa: ARG002 - as the reducer calls it
        """Records that a pass has ended, with all that was done for it."""
        self.note("E")

    def end_step(self) -> bool:
        """An optimizer has stepped. If no backward pass was since another one did, that belongs to the same step.

        Returns:
            Whether this was the first optimizer of its step.
        """
        first = self._passed
        if self._passed or self._most > self._latest[0]:
            self._latest = self._most, self._fullest
        self.done = self._done if self._passed else [*self.done, *self._done]
        self._done = []
        self._passed = False
        self._note()
        return first

    @property
    def fullest(self) -> Mapping[str, int]:
        """Bytes by kind at the fullest moment of the latest step; before the first one, since the beginning."""
        return self._latest[1] if self._latest[0] else self._fullest
