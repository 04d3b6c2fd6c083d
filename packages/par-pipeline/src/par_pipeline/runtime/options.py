"""Policies of a `Pipeline`: how tensors travel between its ranks, and how the losses of microbatches are weighed."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ..wire.lanes import MakeLanes, make_lanes
from .feed import Weight

SplitWhere = Literal["required", "where possible"]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Options for transfers of activations and gradients between the ranks of a pipeline.

    Args:
        dtype: A dtype such as torch.bfloat16. Wider outputs and gradients are cast to it for the transfer and arrive in
            their own dtype. Default: no cast.
        prefetch: Bytes of receives that are posted ahead, beyond one from each neighbouring rank. Over gloo these are
            messages, whose buffers are kept from step to step. Over NCCL they are tensors, allocated for one step.
        timeout: Seconds after which a rank that waits for another rank raises an error.
        lanes: Function that makes the connections: `lanes(group, device, timeout)` returns `Lanes`, on all ranks. Tests
            pass their own, to send tensors over other communicators.
    """

    dtype: torch.dtype | None = None
    prefetch: int = 1 << 28
    timeout: float = 600.0
    lanes: MakeLanes = make_lanes

    def check(self) -> None:
        """Check the values. `Pipeline` calls this, so that all ranks raise an error that one rank finds.

        Raises:
            ValueError: A number is not positive, or the dtype is not floating point.
        """
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout}: seconds are positive and finite; pass such a number")
        if self.prefetch <= 0:
            raise ValueError(f"prefetch={self.prefetch}: a number of bytes is positive; pass such a number")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"dtype={self.dtype}: tensors travel in floating point; pass such a dtype, or None")


@dataclass(frozen=True, kw_only=True)
class LossWeight:
    """Weight of a microbatch's loss in the loss of the batch.

    Args:
        of: Function that returns the weight of a microbatch from its target, such as the number of tokens.
        group: The data-parallel ranks over which gradients are averaged, if weights differ between them.
        normalize: Whether each loss is multiplied by its weight divided by the sum of all weights. If False, it is
            multiplied by its weight as it is.
    """

    of: Weight
    group: dist.ProcessGroup | None = None
    normalize: bool = True


DEFAULT_TRANSPORT = Transport()
