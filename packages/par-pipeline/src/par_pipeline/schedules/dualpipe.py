"""DualPipe-V: forwards and backwards next to each other, so that one's communication can hide behind the other."""

from collections import deque
from collections.abc import Iterator

from .actions import Action
from .generate import Generated, check_sizes, numbered
from .placement import v_shaped
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("dualpipe_v")
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Return DualPipe-V: a forward of one stage next to a backward of the rank's other stage, no bubble at the ends.

    Rank r holds the stages r and 2 `ranks` - 1 - r, and keeps at most 2 `ranks` + 1 activations.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step, at least 2 `ranks`.

    Raises:
        ValueError: There are fewer than 2 `ranks` microbatches.

    Source: DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 3.2.1; its cut in half is Sea AI Lab's.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ValueError(
            f"dualpipe_v on {ranks} ranks needs at least {2 * ranks} microbatches, but there are {microbatches}; "
            "cut the batch into more, or use zb_v"
        )
    actions = [Generated(_dualpipe_v, rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, placement=v_shaped(ranks), microbatches=microbatches)


def _dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return numbered(_order(rank, ranks, microbatches), microbatches)


def _order(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield one rank's operations and stages, in the phases of the paper's figure: fill, steady state, drain."""
    down, up = v_shaped(ranks)[rank]
    below = ranks - 1 - rank
    # The first microbatch takes 2 `below` hops down the V and back up to this rank, which runs as many forwards in the
    # meantime.
    yield from [("F", down)] * (2 * below)
    yield from [("F", down), ("F", up)] * (rank + 1)
    # The ranks before still wait for their first gradients. A split backward sends them the input gradient before it
    # computes the weight gradient.
    yield from [("I", up), ("W", up), ("F", up)] * below
    for _ in range(microbatches - ranks - below):
        # Neighbours in this list belong to different stages and microbatches, so the communication of one overlaps the
        # computation of the other.
        yield from [("F", down), ("B", up), ("F", up), ("B", down)]
    yield from [("B", up), ("F", up), ("B", down)] * below
    yield from _cool_down(down, up, rank, below)


def _cool_down(down: int, up: int, rank: int, below: int) -> Iterator[tuple[str, int]]:
    """Yield the last backwards of one rank, alternating its stages: complete ones, split ones, weight gradients."""
    turns = [up, down] * (rank + 1)
    # Towards the end there are no more forwards to overlap with, so weight gradients are kept back to fill the waits.
    later = deque(turns[rank + 1 :])
    yield from (("B", stage) for stage in turns[: rank + 1])
    yield from (("I", stage) for stage in later)
    for _ in range(below):
        yield "W", later.popleft()
        yield "I", down
        later.append(down)
    yield from (("W", stage) for stage in later)
