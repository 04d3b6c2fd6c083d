"""Action of a pipeline: an operation of one rank on one stage and one microbatch."""

import re
from typing import Final, NamedTuple

FORWARD: Final = "F"
BACKWARD: Final = "B"
INPUT_GRAD: Final = "I"
WEIGHT_GRAD: Final = "W"

OPERATION_NAMES: Final = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
}

KEPT_ACTIVATIONS: Final = {FORWARD: 1, BACKWARD: -1, INPUT_GRAD: 0, WEIGHT_GRAD: -1}
"""By how much an action changes the number of activations that its rank keeps."""

_TEXT: Final = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


class Action(NamedTuple):
    """One action, "2F0" as text: stage 2, forward, microbatch 0.

    Attributes:
        op: "F" forward, "B" whole backward, or its two parts, "I" input gradient and "W" weight gradient.
        stage: Number of the stage in the whole pipeline, from 0.
        microbatch: Number of the microbatch in the step, from 0.
    """

    op: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read an action from the text that `str` writes, such as "2F0".

        Raises:
            ValueError: The text is not of that form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action; write stage, one of F B I W, and microbatch, such as '2F0'")
        stage, op, microbatch = match.groups()
        return cls(op, int(stage), int(microbatch))


def check_action(value: object, rank: int, position: int) -> None:
    """Refuses an entry of a schedule that is no `Action`.

    Raises:
        ValueError: The message names the rank and the position of the entry.
    """
    if not isinstance(value, Action):
        raise ValueError(
            f"rank {rank}, position {position}: {value!r} is no Action; write Action('F', 2, 0), or Action.parse('2F0')"
        )
