"""Checks of the options with which the loss of a rank is survived."""

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from par_precision import MixedOptimizer

from ...strategy.options import StrategyOptions


def nccl_error(device: str) -> ValueError:
    """Return the error that says why survivors need gloo."""
    return ValueError(
        f"device={device!r}: survivors need gloo, because an abort of an NCCL communicator does not reach the "
        "communicators split from it, and a rank that waits there would hang; pass device='cpu', or let the launcher "
        "start the job again from its checkpoint"
    )


def mixed_of(optimizer: Optimizer) -> MixedOptimizer:
    """Return an optimizer that `Strategy.initialize` returned, whose step weighs losses by their samples.

    Raises:
        ValueError: A plugin controls precision.
    """
    if not isinstance(optimizer, MixedOptimizer):
        raise ValueError(
            f"a plugin controls precision, and {type(optimizer).__name__} does not sum weights of losses; remove the "
            "plugin to survive the loss of a rank"
        )
    return optimizer


def check_options(options: StrategyOptions) -> None:
    """Raise ValueError for options with which the loss of a rank is not survived."""
    device = options.device if options.device != "auto" else "cpu"
    if torch.device(device).type != "cpu":
        raise nccl_error(options.device)
    if options.parallel is not None and (
        not isinstance(options.parallel, Mapping)
        or any(
            (given.get("size", 1) if isinstance(given, Mapping) else given) != 1
            for axis, given in options.parallel.items()
            if axis != "data"
        )
    ):
        raise ValueError(
            f"parallel={options.parallel!r}: only data-parallel replicas of one rank survive the loss of a rank; "
            "remove it, or let the launcher start the job again from its checkpoint"
        )
    if options.numerics != "ordinary":
        raise ValueError(
            f"numerics={options.numerics!r}: lanes must divide by the data ranks, whose number changes with a loss; "
            "use numerics='ordinary'"
        )
    if options.memory is not None or "offload" in options.zero_keywords:
        raise ValueError(
            f"memory={options.memory!r}, zero={options.zero!r}: offloaded state does not move in memory after a loss; "
            "remove memory and offload"
        )
    if options.stage and options.precision_name == "bf16-sr":
        raise ValueError(
            f"precision='bf16-sr', zero={options.stage}: a step rounds by random numbers, which the copy of a shard "
            "on another rank would have to repeat; use precision='bf16' or zero=0"
        )
