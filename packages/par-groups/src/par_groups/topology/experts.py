"""Experts over ranks: the size of the axis "expert", and the view "experts" of the same ranks.

A stage has sequence x expert x tensor ranks, the tensor axis fastest. Its experts see them otherwise: `expert_tensor`
ranks that follow one another cut an expert, `expert_parallel` such groups hold different experts, and the
`expert_data` repetitions of all this are copies. Experts that are folded take ranks of the tensor axis first, then of
the sequence axis. Only what these lack is an axis "expert" of its own: a stage has as few ranks as both divide.
"""

import math
from collections.abc import Mapping

EXPERTS = "experts"
"""The name of the topology's view that defines which ranks hold which experts."""


def own_axis(given: Mapping[str, int | None], cut_over: object) -> int:
    """Return the size of the axis "expert" if experts are folded into the axes that split tokens.

    Args:
        given: Sizes in the config; None is inferred. The size of `expert` is the number of parts into which the experts
            of a layer are partitioned.
        cut_over: Number of ranks over which each expert is sharded, from the config.

    Raises:
        ValueError: A size is to be inferred, or an expert is cut over another number of ranks than 1 or all tensor
            ranks.
    """
    known = {axis: size for axis, size in given.items() if size is not None}
    for axis in ("expert", "sequence", "tensor"):
        if axis not in known:
            raise ValueError(
                f"parallel {axis} has size -1, but where experts are folded, as expert.tensor says, only the size of "
                f"data or pipeline can be inferred; give the size of {axis}"
            )
    tensor = known["tensor"]
    if isinstance(cut_over, bool) or not isinstance(cut_over, int) or cut_over not in (1, tensor):
        allowed = f"1 or {tensor}, the size of the tensor axis" if tensor > 1 else "1, as the tensor axis has one rank"
        raise ValueError(f"parallel expert.tensor is {cut_over!r}; an expert can be cut over {allowed}")
    ranks = known["expert"] * cut_over
    # The smallest axis with which the ranks of a stage are a multiple of the ranks of the experts.
    return ranks // math.gcd(ranks, known["sequence"] * tensor)


def view_of_experts(sizes: Mapping[str, int], size: int, cut_over: int) -> dict[str, int]:
    """Return the axes of the view "experts" and their sizes, slowest first.

    Args:
        sizes: The size of each axis of the config.
        size: The number of parts that the experts of a layer are dealt out in.
        cut_over: The number of ranks that an expert is cut over.
    """
    ranks = sizes["sequence"] * sizes["expert"] * sizes["tensor"]
    return {
        "data": sizes["data"],
        "pipeline": sizes["pipeline"],
        "expert_data": ranks // (size * cut_over),
        "expert_parallel": size,
        "expert_tensor": cut_over,
    }


def check_mode(mode: str | None) -> None:
    """Raise ValueError unless experts can be spread beside this tensor mode."""
    if mode not in (None, "1d"):
        raise ValueError(
            f"experts need tensor mode '1d' or none, the config has {mode!r}; change the mode, or leave expert out"
        )
