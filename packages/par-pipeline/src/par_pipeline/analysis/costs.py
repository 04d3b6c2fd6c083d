"""What an action costs: numbers for the simulator, assumed or measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timeline import Timeline

Cost = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """How long each action takes, in any unit: one number for all stages, or one for each.

    A whole backward takes the time of its two parts.

    Args:
        forward: Of a stage and microbatch.
        input_grad: The backward's part that the stage before waits for.
        weight_grad: The backward's part that nobody waits for.
        communication: From the end of an action to the earliest start of the one on another rank that takes its
            result. One for each stage: between it and the next one, either way; the last one's is not used.

    Raises:
        ValueError: A cost that is negative or not finite.
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    communication: Cost = 0.0

    def __post_init__(self) -> None:
        for name, cost in vars(self).items():
            for each in cost if isinstance(cost, Sequence) else [cost]:
                if not (math.isfinite(each) and each >= 0):
                    raise ValueError(f"the cost {name} is {each}, it must be a number of at least 0")

    def by_stage(self, stages: int) -> tuple[list[float], list[float], list[float], list[float]]:
        """The four costs, each as a list over the stages.

        Raises:
            ValueError: A list for another number of stages.
        """
        forward, input_grad, weight_grad, communication = (
            self._spread(name, cost, stages) for name, cost in vars(self).items()
        )
        return forward, input_grad, weight_grad, communication

    @classmethod
    def measured(cls, timeline: "Timeline", communication: Cost = 0.0) -> "Costs":
        """The medians of a recorded run, for each stage. Where it ran whole backwards, each part gets half of one.

        Args:
            timeline: With at least one forward and one backward of every stage.
            communication: Is no event, so it is not measured; in the timeline's unit.

        Raises:
            ValueError: A stage without a forward or a backward.
        """
        seconds: dict[tuple[int, str], list[float]] = {}
        for _, (op, stage, _), start, end in timeline.events:
            if op == "B":
                for part in "IW":
                    seconds.setdefault((stage, part), []).append((end - start) / 2)
            else:
                seconds.setdefault((stage, op), []).append(end - start)
        stages = range(1 + max(stage for stage, _ in seconds))
        for stage in stages:
            for op in "FIW":
                if (stage, op) not in seconds:
                    raise ValueError(f"stage {stage} has no {op} in the timeline; record a whole step of all ranks")
        forward, input_grad, weight_grad = ([median(seconds[stage, op]) for stage in stages] for op in "FIW")
        return cls(forward, input_grad, weight_grad, communication)

    @staticmethod
    def _spread(name: str, cost: Cost, stages: int) -> list[float]:
        if not isinstance(cost, Sequence):
            return [float(cost)] * stages
        if len(cost) != stages:
            raise ValueError(f"the cost {name} is given for {len(cost)} stages, but there are {stages}")
        return [float(each) for each in cost]
