"""The trace of a step: the units and bytes that each moment needs."""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["forward", "backward", "step"]
"""Kind of a moment."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a step: from the beginning of one unit to the beginning of the next unit.

    Args:
        kind: "forward" or "backward" of a unit, or the optimizer's "step", which makes all gathered units out of date.
        unit: Name of the unit. None (default) at a step, which needs no unit.
        other: Peak bytes on the device that are not gathered parameters, such as activations. Default: 0.
        held: Names of further units that are needed at the same time, such as the unit around this unit. Default: none.

    Raises:
        ValueError: The kind is unknown, a step has units, another moment has no unit, or `other` is negative.
    """

    kind: Kind
    unit: str | None = None
    other: int = 0
    held: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it can be 'forward', 'backward' or 'step'")
        if (self.kind == "step") != (self.unit is None):
            raise ValueError(f"a {self.kind!r} has unit {self.unit!r}; give forward and backward a unit, a step none")
        if self.kind == "step" and self.held:
            raise ValueError(f"a 'step' has held {self.held!r}; a step needs no units, so leave held out")
        if self.other < 0:
            raise ValueError(f"other is {self.other} bytes; give 0 or more")

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the units that must be gathered, each once."""
        # The unit comes first. `held` may contain it again, for which its bytes must not count twice.
        return tuple(dict.fromkeys((*(() if self.unit is None else (self.unit,)), *self.held)))


@dataclass(frozen=True)
class Trace:
    """The moments of a step, in order. A trace is cyclic: the next step begins with the first moment again.

    Args:
        moments: Moments of the step. Passes that accumulate gradients, and evaluations, belong to the step after them.
    """

    moments: tuple[Moment, ...]
