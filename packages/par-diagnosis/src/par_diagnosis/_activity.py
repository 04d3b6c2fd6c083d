"""Progress that the program of one rank reports: step, phase and logged values."""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import SupportsFloat

from torch import Tensor

_KEPT = 64
"""Number of values that are kept under each name."""


class Activity:
    """Progress that a program reports; a call takes about a microsecond and never waits.

    Args:
        facts: Values that must be identical on all ranks, by name, such as the batch size.

    Attributes:
        facts: The same values as text.
        step: Number of finished steps. None before the first report.
        phase: Current phase, such as "data". "" before the first report.
        since: Start of the phase, by `time.monotonic`.
    """

    def __init__(self, facts: Mapping[str, object] | None = None) -> None:
        self.facts = {name: str(value) for name, value in (facts or {}).items()}
        self.step: int | None = None
        self.phase = ""
        self.since = time.monotonic()
        self._values: dict[str, deque[Tensor | SupportsFloat]] = {}

    def update(self, step: int | None, phase: str) -> None:
        """Report progress.

        Args:
            step: Number of finished steps; None if the program does not count steps.
            phase: The phase that begins now. "data", "checkpoint", "log" and "restart" are shown in words.
        """
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def log(self, values: Mapping[str, Tensor | SupportsFloat]) -> None:
        """Keep the latest values, such as the loss. A dump names those that are not finite.

        Args:
            values: Numbers by name. A tensor is kept without its graph, and is not read now.
        """
        for name, value in values.items():
            latest = self._values.setdefault(name, deque(maxlen=_KEPT))
            latest.append(value.detach() if isinstance(value, Tensor) else value)

    def non_finite(self) -> str:
        """Return the names whose latest values include one that is not finite, in words."""
        odd = {name: [value for value in tuple(latest) if _is_odd(value)] for name, latest in self._values.items()}
        return ", ".join(f"{name} is {float(values[-1])}" for name, values in odd.items() if values)


def _is_odd(value: Tensor | SupportsFloat) -> bool:
    # To read a tensor on a GPU could block for ever: its kernels may wait for a collective that hangs.
    if isinstance(value, Tensor) and (not value.is_cpu or value.numel() != 1):
        return False
    return not math.isfinite(float(value))
