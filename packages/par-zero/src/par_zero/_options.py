"""The options of `shard`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ._param_groups import Atomic

Units = str | Callable[[nn.Module], bool] | Sequence[nn.Module]
"""How units are chosen: "auto", a function that says of a module whether it is one, or the modules themselves."""

Fill = Callable[[nn.Module, str], None]
"""Fills a module, given with what comes before its names, such as "blocks.0."."""


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Options of `shard`, checked. Every field is a keyword of `shard`, with the same default.

    Args:
        units: Which modules are gathered by themselves at stage 3. "auto": the items of every ModuleList, ModuleDict
            and Sequential, small neighbours together. Or a function that is True of a module that is a unit, or a list
            of the modules.
        bucket: Bytes of parameters that are reduced as one, such as 10_000_000.
        param_dtype: Dtype of the parameters in use, such as torch.bfloat16, while the optimizer keeps copies in their
            original dtype. None: the original dtype.
        reduce_dtype: Dtype in which gradients are added up over microbatches and ranks. None: the parameters' dtype.
        reduce: "mean" or "sum" of the gradients over the ranks.
        atomic: Whether parameters stay whole on one rank, which optimizers need that do not work element by element,
            such as Muon and Adafactor. True: all; or a function that says so of a param group.

    Raises:
        TypeError: A value of another type.
        ValueError: A value that is not allowed.
    """

    units: Units = "auto"
    bucket: int = 10_000_000
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: str = "mean"
    atomic: Atomic = False

    def __post_init__(self) -> None:
        if not isinstance(self.bucket, int) or isinstance(self.bucket, bool):
            raise TypeError(f"bucket is {self.bucket!r}; give a whole number of bytes, such as 10_000_000")
        if not isinstance(self.atomic, bool) and not callable(self.atomic):
            raise TypeError(f"atomic is {self.atomic!r}; give True, False, or a function of a param group")
        if self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket} bytes; give 1 or more")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce is {self.reduce!r}; it can be 'mean' or 'sum'")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} is {dtype!r}; give a dtype, such as torch.bfloat16")
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
                raise ValueError(f"{name} is {dtype}; give a floating-point dtype of 16 bits or more")
