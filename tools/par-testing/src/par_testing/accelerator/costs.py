"""How long a kernel or a copy takes in virtual time."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..strict.flops import flops_of
from .options import Costs


def seconds_of_kernel(
    costs: Costs, operator: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any, moved: int
) -> float:
    """Return the seconds of an operator: those of its arithmetic or of its memory, whichever takes longer.

    Args:
        costs: Speed of the device.
        operator: Operator that ran.
        args: Its arguments.
        named: Its arguments by name.
        result: What it returned.
        moved: Bytes that it read and wrote.
    """
    return max(flops_of(operator, args, named, result) / costs.flops, moved / costs.memory)


def seconds_of_copy(costs: Costs, size: int) -> float:
    """Return the seconds of a copy of that many bytes between host and device."""
    return costs.latency + size / costs.link
