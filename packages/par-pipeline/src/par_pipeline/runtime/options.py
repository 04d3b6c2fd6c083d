"""The keywords of a `Pipeline` as one value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from ..wire.lanes import MakeLanes, make_lanes
from .feed import Weight
from .microbatches import Split, split_rows
from .offload import Offload
from .run import Loss
from .shared import Shared

SplitWhere = Literal["required", "where possible"]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The keywords of `Pipeline`, checked, as one value: `pipeline.options`. `Pipeline` says what each of them means.

    Raises:
        ValueError: A timeout or a number of bytes is not positive, or `border_dtype` is not floating point.
        TypeError: The shared parameters are no sequence.
    """

    loss_fn: Loss | None = None
    split: Split = split_rows
    weight: Weight | None = None
    weight_group: dist.ProcessGroup | None = None
    shared: Sequence[Shared] = ()
    offload: Offload | None = None
    broadcast_loss: bool = False
    complete: Callable[[int], None] | None = None
    border_dtype: torch.dtype | None = None
    ahead: int = 1 << 28
    timeout: float = 600.0
    split_backward: SplitWhere = "required"
    lanes: MakeLanes = make_lanes

    def __post_init__(self) -> None:
        if not (0 < self.timeout < math.inf and self.ahead > 0):
            raise ValueError(f"timeout is {self.timeout} s and ahead {self.ahead} bytes; give positive numbers")
        if not isinstance(self.shared, Sequence):
            raise TypeError(f"shared is a {type(self.shared).__name__}; give a list of Shared")
        stranger = next((each for each in self.shared if not isinstance(each, Shared)), None)
        if stranger is not None:
            raise TypeError(f"shared has a {type(stranger).__name__} in it; give a list of Shared")
        if self.split_backward not in get_args(SplitWhere):
            raise ValueError(f"split_backward is {self.split_backward!r}; give 'required' or 'where possible'")
        dtype = self.border_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"border_dtype is {self.border_dtype}; give a floating-point dtype such as torch.bfloat16")
