"""How many bytes of what comes and goes within a step there are, and how many there were at the fullest moment."""

from collections.abc import Mapping

UNITS, GRADIENTS, BUFFERS = "units", "gradients", "buffers"
"""What comes and goes: gathered parameters, gradients, and memory that chunks lend each other."""


class Meter:
    """Adds up bytes as memory is taken and given back; a few integers each time."""

    def __init__(self) -> None:
        self._now = dict.fromkeys((UNITS, GRADIENTS, BUFFERS), 0)
        self._total = 0
        self._passed = False  # whether a backward pass has ended since the latest step
        self._latest = (0, dict(self._now))  # of the latest step: the most bytes in all, and of what they were
        self._note()

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

    def end_step(self) -> None:
        """An optimizer has stepped. If no backward pass was since another one did, that belongs to the same step."""
        if self._passed or self._most > self._latest[0]:
            self._latest = self._most, self._fullest
        self._passed = False
        self._note()

    @property
    def fullest(self) -> Mapping[str, int]:
        """Bytes by kind at the fullest moment of the latest step; before the first one, since the beginning."""
        return self._latest[1] if self._latest[0] else self._fullest
