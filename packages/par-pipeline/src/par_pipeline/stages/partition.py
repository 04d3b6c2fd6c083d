"""Which layers make up which stage: contiguous parts, the largest of them as small as can be."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

METHODS = ("uniform", "parameter", "time")


def partition(
    layers: int | Sequence[Any], parts: int, method: str | Sequence[float] = "uniform", *, sample: Any = None
) -> list[range]:
    """Cuts layers into contiguous parts, none of them empty.

    The largest part is as small as any cut can make it. Among such cuts the parts are as equal as can be, by the sum
    of their squares. For stages of one rank each, `parts` is the number of ranks; else that of all stages.

    Args:
        layers: The layers, or how many there are.
        parts: Number of parts.
        method: What is balanced: "uniform" the number of layers, the larger parts last, where fewer activations are
            kept; "parameter" their parameters; "time" the seconds of forward and backward, measured once on this
            rank, so share the result; or a list with a weight for each layer.
        sample: For "time", an input of the first layer.

    Returns:
        For each part, the positions of its layers.

    Raises:
        ValueError: There are more parts than layers, the method is unknown, or weights are no weights.
        TypeError: A size is no whole number, or layers cannot be measured.
    """
    count = layers if isinstance(layers, int) else len(layers)
    if not isinstance(parts, int) or isinstance(parts, bool) or isinstance(layers, bool):
        raise TypeError(f"parts is {parts!r} and layers is {layers!r}; parts must be a whole number")
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers cannot be cut into {parts} parts; ask for 1 to {count}")
    uniform = isinstance(method, str) and method == "uniform"
    weights = [1] * count if uniform else _weights(layers, method, sample)
    if len(weights) != count:
        raise ValueError(f"there are {len(weights)} weights for {count} layers; give one for each")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight {weight} must be a finite number of at least 0")
    if uniform or not any(weights):
        size, larger = divmod(count, parts)
        ends = [size * part + max(0, part - (parts - larger)) for part in range(1, parts + 1)]
    else:
        ends = _balanced([0, *accumulate(weights)], parts)
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _weights(layers: int | Sequence[Any], method: str | Sequence[float], sample: Any) -> Sequence[float]:
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ValueError(f"no method is called {method!r}; use one of {', '.join(METHODS)}, or a list of weights")
    if isinstance(layers, int):
        raise TypeError(f"the method {method!r} measures the layers themselves; give them, not their number")
    from .layer_costs import count_parameters, measure_seconds  # noqa: PLC0415 - needs torch

    return count_parameters(layers) if method == "parameter" else measure_seconds(layers, sample)


def _balanced(sums: Sequence[float], parts: int) -> list[int]:
    """The ends of the parts, among all cuts with the smallest largest part those with the least sum of squares.

    Args:
        sums: The sums of the first 0, 1, ... weights.
        parts: Number of parts.
    """
    limit = _smallest_limit(sums, parts)
    count = len(sums) - 1
    cost = [0.0] + [math.inf] * count  # by the number of layers that the parts so far take
    cuts: list[list[int]] = []
    for _ in range(parts):
        cost, starts = _add_part(sums, limit, cost)
        cuts.append(starts)
    ends = [count]
    for starts in reversed(cuts[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _add_part(sums: Sequence[float], limit: float, cost: list[float]) -> tuple[list[float], list[int]]:
    """Adds one part to the cheapest cuts so far.

    Args:
        sums: The sums of the first 0, 1, ... weights.
        limit: The largest size that a part may have.
        cost: By the number of layers that the parts so far take, the least sum of squared sizes.

    Returns:
        The same costs with one part more, and where that part then starts.
    """
    best, starts = [math.inf] * len(sums), [0] * len(sums)
    for end in range(1, len(sums)):
        for start in range(end - 1, -1, -1):
            size = sums[end] - sums[start]
            if size > limit:
                break
            if cost[start] + size * size < best[end]:
                best[end], starts[end] = cost[start] + size * size, start
    return best, starts


def _smallest_limit(sums: Sequence[float], parts: int) -> float:
    """The least size of the largest part.

    Parts are filled from the left up to a limit. Where that takes too many, the next limit to try is the smallest that
    lets one of them take one more layer: with any below it they would be the same.
    """
    below_mean = sums[-1] / parts * (1 - 1e-9)  # rounding must not lift it over the answer
    limit = max(below_mean, *(second - first for first, second in pairwise(sums)))
    while True:
        filled, larger = _fill(sums, limit)
        if filled <= parts:
            return limit
        limit = larger


def _fill(sums: Sequence[float], limit: float) -> tuple[int, float]:
    """The number of parts that a limit takes, and the smallest size above it that one of them could have had."""
    start, filled, larger = 0, 0, math.inf
    while start < len(sums) - 1:
        beyond = _beyond(sums, start, limit)
        if beyond < len(sums):
            larger = min(larger, sums[beyond] - sums[start])
        start, filled = beyond - 1, filled + 1
    return filled, larger


def _beyond(sums: Sequence[float], start: int, limit: float) -> int:
    """The first end at which a part that starts here is larger than the limit."""
    return bisect_right(sums, limit, lo=start + 1, key=lambda total: total - sums[start])
