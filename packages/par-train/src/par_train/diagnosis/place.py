"""How far a rank's program has come: a step, what its time goes into, and numbers that it has logged."""

import math
import time
from collections.abc import Mapping

from torch import Tensor

Value = Tensor | float | int


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
        self._values: dict[str, Value] = {}

    def at(self, step: int | None, phase: str) -> None:
        """Tells how many steps are done, and what comes now."""
        self.step, self.phase, self.since = step, phase, time.monotonic()

    def note(self, values: Mapping[str, Value]) -> None:
        """Keeps what was logged last, to be looked at if something goes wrong: a number that is not finite stays."""
        for name, value in values.items():
            if not _is_odd(self._values.get(name)):
                self._values[name] = value.detach() if isinstance(value, Tensor) else value  # without its graph

    def not_finite(self) -> str:
        """The numbers that are not finite, in words; those on a device, which may be stuck, are not looked at."""
        odd = {name: value for name, value in self._values.items() if _is_odd(value)}
        return ", ".join(f"{name} is {float(value)}" for name, value in odd.items())


def _is_odd(value: Value | None) -> bool:
    if value is None or (isinstance(value, Tensor) and (not value.is_cpu or value.is_meta or value.numel() != 1)):
        return False
    return not math.isfinite(float(value))
