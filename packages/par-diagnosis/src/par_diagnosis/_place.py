"""How far a rank's program has come: a step, what its time goes into, and numbers that it has logged."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import SupportsFloat

from torch import Tensor

_KEPT = 64
"""How many of the last values of a name are kept."""


class Place:
    """What a program tells of its progress; each word costs a microsecond and no wait.

    Args:
        facts: What this rank was told and ranks should have alike, by name.

    Attributes:
        step: Steps done; None until somebody tells.
        phase: What time goes into, such as "data"; "" until somebody tells.
        since: When that began, by `time.monotonic`.
    """

    def __init__(self, facts: Mapping[str, object] | None = None) -> None:
        self.facts = {name: str(value) for name, value in (facts or {}).items()}
        self.step: int | None = None
        self.phase = ""
        self.since = time.monotonic()
        self._values: dict[str, deque[Tensor | SupportsFloat]] = {}

    def at(self, step: int | None, phase: str) -> None:
        """Tells how many steps are done, and what comes now."""
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def note(self, values: Mapping[str, Tensor | SupportsFloat]) -> None:
        """Keeps what was logged last, to be looked at if something goes wrong."""
        for name, value in values.items():
            last = self._values.setdefault(name, deque(maxlen=_KEPT))
            last.append(value.detach() if isinstance(value, Tensor) else value)  # without its graph

    def not_finite(self) -> str:
        """The names whose last values have one that is not finite, in words; those on a device are not looked at."""
        odd = {name: [value for value in tuple(last) if _is_odd(value)] for name, last in self._values.items()}
        return ", ".join(f"{name} is {float(values[-1])}" for name, values in odd.items() if values)


def _is_odd(value: Tensor | SupportsFloat) -> bool:
    if isinstance(value, Tensor) and (not value.is_cpu or value.numel() != 1):
        return False
    return not math.isfinite(float(value))
