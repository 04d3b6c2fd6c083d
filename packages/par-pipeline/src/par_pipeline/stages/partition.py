"""Partition of layers into stages: contiguous parts with the smallest possible largest part."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

METHODS = ("uniform", "parameter", "time")


def partition(
    layers: int | Sequence[Any], parts: int, method: str | Sequence[float] = "uniform", *, sample: Any = None
) -> list[range]:
    """Partition layers into contiguous, non-empty parts.

    The largest part is as small as possible. Among all partitions with this property, the function takes the partition
    with the smallest sum of squared sizes. `parts` is the number of stages over all ranks.

    Args:
        layers: Layers, or their number.
        parts: Number of parts.
        method: Quantity to balance. "uniform": the number of layers; larger parts are last, because later stages save
            fewer activations. "parameter": the number of parameters. "time": the seconds of forward and backward,
            measured once on this rank; send the result to the other ranks. Or a list with a weight for each layer.
            Default: "uniform".
        sample: Input of the first layer, for "time".

    Returns:
        Positions of the layers of each part.

    Raises:
        ValueError: There are more parts than layers, the method is unknown, or a weight is not a finite number of at
            least 0.
        TypeError: A size is not an integer, or layers cannot be measured.
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
        # Later stages save fewer activations, so they take the extra layers.
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
    """Return the ends of the parts with the smallest largest part, and among these the smallest sum of squares.

    Args:
        sums: Sums of the first 0, 1, ... weights.
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
    """Add one part to the cheapest partitions so far.

    Args:
        sums: Sums of the first 0, 1, ... weights.
        limit: Largest allowed size of a part.
        cost: Smallest sum of squared sizes, by the number of layers in the parts so far.

    Returns:
        The same costs with one more part, and the start of that part.
    """
    best, starts = [math.inf] * len(sums), [0] * len(sums)
    for end in range(1, len(sums)):
        for start in range(end - 1, -1, -1):
            size = sums[end] - sums[start]
            # Sizes only grow to the left, so no earlier start fits either.
            if size > limit:
                break
            if cost[start] + size * size < best[end]:
                best[end], starts[end] = cost[start] + size * size, start
    return best, starts


def _smallest_limit(sums: Sequence[float], parts: int) -> float:
    """Return the smallest possible size of the largest part.

    Parts are filled from the left up to a limit. If this needs too many parts, the next limit is the smallest at which
    one part can take one more layer: any lower limit would give the same parts again.
    """
    below_mean = sums[-1] / parts * (1 - 1e-9)  # rounding must not lift it over the answer
    limit = max(below_mean, *(second - first for first, second in pairwise(sums)))
    while True:
        filled, larger = _fill(sums, limit)
        if filled <= parts:
            return limit
        limit = larger


def _fill(sums: Sequence[float], limit: float) -> tuple[int, float]:
    """Return the number of parts for a limit, and the smallest size above the limit that one part could have."""
    start, filled, larger = 0, 0, math.inf
    while start < len(sums) - 1:
        beyond = _beyond(sums, start, limit)
        if beyond < len(sums):
            larger = min(larger, sums[beyond] - sums[start])
        # The part ends before the layer that would exceed the limit.
        start, filled = beyond - 1, filled + 1
    return filled, larger


def _beyond(sums: Sequence[float], start: int, limit: float) -> int:
    """Return the first end at which a part from `start` is larger than the limit."""
    return bisect_right(sums, limit, lo=start + 1, key=lambda total: total - sums[start])
