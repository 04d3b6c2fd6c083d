"""Checks of the options with which the loss of a rank is survived."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from par_precision import MixedOptimizer

from ..._torch_private import tree_map
from ...strategy.execute import rows_of
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


def lanes_of(batch: Any, lanes: int) -> list[Any]:
    """Return this rank's rows of a batch as lanes of canonical numerics.

    Args:
        batch: Tensors, or containers of tensors, with rows on dim 0.
        lanes: Number of lanes of this rank.

    Raises:
        ValueError: The lanes have different numbers of rows.
    """
    rows = rows_of(batch)
    if rows % lanes:
        raise ValueError(
            f"the batch of a rank has {rows} rows, which {lanes} lanes do not divide; pass a batch size that the lanes "
            "of all ranks divide"
        )

    def part(lane: int, value: Any) -> Any:
        return value[lane * rows // lanes : (lane + 1) * rows // lanes] if isinstance(value, Tensor) else value

    return [tree_map(partial(part, lane), batch) for lane in range(lanes)]


def mean_of(given: Any) -> Tensor:
    """Return a lane's mean loss.

    Raises:
        ValueError: It is a sum and the number of its items, which lanes would have to weigh.
    """
    if isinstance(given, tuple):
        raise ValueError(
            "loss_of() returned a sum and a number of items, and each lane of canonical numerics weighs the same; "
            "return a mean"
        )
    loss: Tensor = given
    return loss


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
