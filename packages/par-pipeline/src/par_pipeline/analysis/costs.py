"""Costs of actions for the simulator, assumed or measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from ..schedules.walk import StageCosts
from .timeline import Timeline

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Duration of each action, in any unit: one number for all stages, or a list with one number for each stage.

    A complete backward takes the time of its two parts.

    Args:
        forward: Time of the forward of one stage and microbatch.
        input_grad: Time of the input gradient, which the stage before waits for.
        weight_grad: Time of the weight gradient, which no rank waits for.
        communication: Time from the end of an action to the earliest start of the action on another rank that takes
            its result. In a list, an entry is for the way between its stage and the next one, in either direction;
            the last stage's is not used.

    Raises:
        ValueError: A cost is negative or not finite.
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    communication: Cost = 0.0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            for number in cost if isinstance(cost, Sequence) else [cost]:
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"the cost {name} is {number}, it must be a number of at least 0")

    def by_stage(self, stages: int) -> StageCosts:
        """Return the same costs with every cost as a list of one number per stage.

        Raises:
            ValueError: A list has a different number of stages.
        """
        lists = []
        for name, cost in vars(self).items():
            if isinstance(cost, Sequence) and len(cost) != stages:
                raise ValueError(f"the cost {name} is given for {len(cost)} stages, but there are {stages}")
            lists.append([float(number) for number in (cost if isinstance(cost, Sequence) else [cost] * stages)])
        return StageCosts(*lists)

    @classmethod
    def measured(cls, timeline: Timeline, communication: Cost = 0.0) -> "Costs":
        """Take the medians of a recorded run, stage by stage; of a whole backward, each part gets half.

        Args:
            timeline: A step with at least one forward and one backward of every stage.
            communication: Time of a message, in the timeline's unit. It is no event, so it cannot be measured.

        Raises:
            ValueError: A stage has no forward or no backward in the timeline.
        """
        parts = (FORWARD, INPUT_GRAD, WEIGHT_GRAD)
        seconds: dict[tuple[int, str], list[float]] = {}
        for _, (op, stage, _), start, end in timeline.events:
            if op == BACKWARD:
                for part in (INPUT_GRAD, WEIGHT_GRAD):
                    seconds.setdefault((stage, part), []).append((end - start) / 2)
            else:
                seconds.setdefault((stage, op), []).append(end - start)
        stages = range(1 + max(stage for stage, _ in seconds))
        for stage in stages:
            for op in parts:
                if (stage, op) not in seconds:
                    raise ValueError(f"stage {stage} has no {op} in the timeline; record a whole step of all ranks")
        forward, input_grad, weight_grad = ([median(seconds[stage, op]) for stage in stages] for op in parts)
        return cls(forward, input_grad, weight_grad, communication)
