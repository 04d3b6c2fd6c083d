"""One reference for all ranks: what one device gives is the same on each, and so is computed on one of them."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


def once(function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """What a function returns on rank 0, on every rank. Collective over the world.

    For a reference whose computing takes longer than its sending: on four ranks that share two cores it would take
    four times as long if each computed it by itself.

    Args:
        function: Called on rank 0 alone, and so without collectives. What it returns is pickled.
        arguments: Its arguments.
        keywords: Its keywords.
    """
    given: list[Any] = [function(*arguments, **keywords) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given)
    found: T = given[0]
    return found
