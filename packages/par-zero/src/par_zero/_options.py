"""The options of `shard`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ._cost import bucket_bytes
from ._param_groups import Atomic, Elementwise

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
        bucket: Bytes of parameters that are reduced as one, such as 10_000_000; or "auto", for what `bucket_bytes` says
            of the ranks that share: 25 MB or more, and more the more ranks there are.
        inflight: Number of chunks whose reductions may be under way in backward, before it waits for the oldest. None:
            two where a GPU waits, else any number.
        param_dtype: Dtype of the parameters in use, such as torch.bfloat16, while the optimizer keeps copies in their
            original dtype. None: the original dtype.
        reduce_dtype: Dtype in which gradients are added up over microbatches and ranks. None: the parameters' dtype.
        reduce: "mean" or "sum" of the gradients over the ranks.
        atomic: Whether each parameter stays whole on one rank. True: all; or a function that says so of a param group.
            Known optimizers that need whole tensors, such as Muon and Adafactor, have them anyway.
        elementwise: Whether an optimizer of a class that par-zero does not know treats each element by itself. True:
            all; or a function that says so of a param group.

    Raises:
        TypeError: A value of another type.
        ValueError: A value that is not allowed.
    """

    units: Units = "auto"
    bucket: int | Literal["auto"] = 10_000_000
    inflight: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: str = "mean"
    atomic: Atomic = False
    elementwise: Elementwise = False

    def __post_init__(self) -> None:
        if self.bucket != "auto" and type(self.bucket) is not int:
            raise TypeError(f"bucket is {self.bucket!r}; give a whole number of bytes, such as 10_000_000, or 'auto'")
        if self.inflight is not None and type(self.inflight) is not int:
            raise TypeError(f"inflight is {self.inflight!r}; give a whole number of chunks, such as 2, or None")
        if not isinstance(self.atomic, bool) and not callable(self.atomic):
            raise TypeError(f"atomic is {self.atomic!r}; give True, False, or a function of a param group")
        if not isinstance(self.elementwise, bool) and not callable(self.elementwise):
            raise TypeError(
                f"elementwise={self.elementwise!r}: it says so of all or of each param group; pass True, "
                "False, or a function of a param group"
            )
        if isinstance(self.bucket, int) and self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket} bytes; give 1 or more")
        if self.inflight is not None and self.inflight < 1:
            raise ValueError(f"inflight is {self.inflight} chunks; give 1 or more, or None")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce is {self.reduce!r}; it can be 'mean' or 'sum'")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} is {dtype!r}; give a dtype, such as torch.bfloat16")
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
                raise ValueError(f"{name} is {dtype}; give a floating-point dtype of 16 bits or more")

    def bucket_of(self, ranks: int) -> int:
        """Bytes of parameters that are reduced as one.

        Args:
            ranks: Number of ranks that share.
        """
        return bucket_bytes(ranks) if isinstance(self.bucket, str) else self.bucket
