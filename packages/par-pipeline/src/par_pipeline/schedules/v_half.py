"""V-Half: half of 1F1B's memory, and three quarters of V-Min's bubble."""

from collections import deque
from collections.abc import Iterator
from itertools import repeat

from .actions import Action
from .generate import check_sizes
from .placement import v_shaped
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("v_half")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Return V-Half: half of 1F1B's memory, `ranks` + 2 activations of stages half as large.

    Rank r holds the stages r and 2 `ranks` - 1 - r. The order comes from running the ranks against each other with
    actions of equal length, and is kept as one byte per action.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.

    Source: the memory is that of Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362; the
        order is our own.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    run = _Lockstep(ranks, microbatches)
    actions = [_Listed(order, stages, microbatches) for order, stages in zip(run.orders, run.placement, strict=True)]
    return Schedule(actions, placement=run.placement, microbatches=microbatches)


class _Listed:
    """The actions of one rank, one byte each: a letter for the operation, in lower case for the second stage."""

    def __init__(self, order: bytearray, stages: tuple[int, int], microbatches: int) -> None:
        self._order, self._stages, self._microbatches = order, stages, microbatches

    def __iter__(self) -> Iterator[Action]:
        down, up = self._stages
        kinds = [*((op, op, down) for op in "FIW"), *((op.lower(), op, up) for op in "FIW")]
        following = {
            ord(letter): map(Action, repeat(op), repeat(stage), range(self._microbatches))
            for letter, op, stage in kinds
        }
        return (next(following[letter]) for letter in self._order)


class _Lockstep:
    """Simulation of all ranks in lockstep: in each unit of time, all choose by what was done before it, and then do it.

    The counters say how often each stage has run an operation.
    """

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.last = ranks, 2 * ranks - 1
        self.placement = v_shaped(ranks)
        self.orders = [bytearray() for _ in range(ranks)]
        self._forward = [0] * (2 * ranks) + [microbatches]  # by stage; the data stand before the first one, at [-1]
        self._input = [0] * (2 * ranks)
        self._weight = [0] * (2 * ranks)
        self._pending = [deque[int]() for _ in range(ranks)]  # stages of weight gradients that can run
        left = 6 * ranks * microbatches
        while left:
            # All ranks choose before any of them acts, because an action takes one unit of time to reach the others.
            chosen = [(rank, *choice) for rank in range(ranks) if (choice := self._choose(rank))]
            assert chosen, "v_half: no rank can go on"  # noqa: S101 - our own error
            for rank, op, stage in chosen:
                self._do(rank, op, stage)
            left -= len(chosen)

    def _choose(self, rank: int) -> tuple[str, int] | None:
        """Choose a rank's next action: forwards within the memory limit, input gradients, then weight gradients."""
        down, up = self.placement[rank]
        forward, inputs = self._forward, self._input
        kept_down, kept_up = forward[down] - self._weight[down], forward[up] - self._weight[up]
        if kept_down + kept_up < self.ranks + 2:
            # The second stage goes first: its forward leads to a backward, which frees activations.
            if forward[up] < forward[up - 1]:
                return "F", up
            # The lower the rank, the longer its first stage's activations wait.
            if forward[down] < forward[down - 1] and kept_down < self.ranks + 1 - (rank + 1) // 2:
                return "F", down
        if inputs[down] < inputs[down + 1]:
            return "I", down
        # The last stage has the loss, so its backward needs only its own forward.
        if inputs[up] < (forward[up] if up == self.last else inputs[up + 1]):
            return "I", up
        return ("W", self._pending[rank][0]) if self._pending[rank] else None

    def _do(self, rank: int, op: str, stage: int) -> None:
        if op == "F":
            self._forward[stage] += 1
        elif op == "I":
            self._input[stage] += 1
            self._pending[rank].append(stage)
        else:
            self._weight[stage] += 1
            self._pending[rank].popleft()
        self.orders[rank].append(ord(op if stage < self.ranks else op.lower()))
