"""What a step needs, moment by moment: as data, which can be written to a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["forward", "backward", "step"]
"""What happens at a moment."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a step: from the beginning of one unit to that of the next.

    Args:
        kind: "forward" or "backward" of a unit, or the optimizer's "step", from which on whatever is whole on the
            device is out of date.
        unit: The unit by name; None at a step, which needs none.
        other: Bytes on the device that are no parameters in use, such as activations, at their most.
        held: Further units that are needed meanwhile, such as the one around this one.

    Raises:
        ValueError: Another kind, a step with units, another moment without one, or fewer than no bytes.
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
        """The units that must be there, each once."""
        return tuple(dict.fromkeys((*(() if self.unit is None else (self.unit,)), *self.held)))


@dataclass(frozen=True)
class Trace:
    """The moments of a step, in their order. A trace is cyclic: the next step begins with the first moment again.

    Args:
        moments: The moments. Passes that accumulate gradients, and evaluations, belong to the step after them.
    """

    moments: tuple[Moment, ...]

    def to_json(self) -> str:
        """A text from which `from_json` makes an equal trace."""
        moments = [[moment.kind, moment.unit, moment.other, list(moment.held)] for moment in self.moments]
        return json.dumps({"moments": moments}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Trace":
        """The trace that `to_json` has written.

        Raises:
            ValueError: The text is none of a trace.
        """
        read = json.loads(text)
        if not isinstance(read, Mapping) or not isinstance(read.get("moments"), list):
            raise ValueError(f"{text[:40]!r} is no trace; give what Trace.to_json() has written")
        return cls(tuple(_moment_of(moment) for moment in read["moments"]))


def _moment_of(values: Any) -> Moment:
    """A moment as `to_json` writes it."""
    match values:
        case [str(kind), (str() | None) as unit, int(other), [*held]] if all(isinstance(name, str) for name in held):
            return Moment(kind=kind, unit=unit, other=other, held=tuple(held))  # type: ignore[arg-type]  # checked there
        case _:
            raise ValueError(f"{values!r} is no moment of a trace; give what Trace.to_json() has written")
