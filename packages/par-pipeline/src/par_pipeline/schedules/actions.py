"""One action of a pipeline: what a rank does next, with which stage, for which microbatch."""

import re
from typing import Final, NamedTuple

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT_GRAD: Final = "I"
WEIGHT_GRAD: Final = "W"

_TEXT: Final = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


class Action(NamedTuple):
    """One action, "2F0" as text: stage 2, forward, microbatch 0.

    Attributes:
        op: "F" forward, "B" whole backward, or its two parts, "I" input gradient and "W" weight gradient.
        stage: Counted over the whole pipeline, from 0.
        microbatch: From 0.
    """

    op: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that `str` writes so.

        Raises:
            ValueError: The text is not of the form "2F0".
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no action; write stage, one of F B I W, and microbatch, such as '2F0'")
        stage, op, microbatch = found.groups()
        return cls(op, int(stage), int(microbatch))


def check_action(value: object, rank: int, position: int) -> None:
    """Refuses what is no action.

    Raises:
        ValueError: With its place.
    """
    if not isinstance(value, Action):
        raise ValueError(
            f"rank {rank}, position {position}: {value!r} is no Action; write Action('F', 2, 0), or Action.parse('2F0')"
        )
