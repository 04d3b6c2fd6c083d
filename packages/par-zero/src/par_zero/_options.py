"""How to shard."""

from dataclasses import dataclass

import torch

from .layout.units import Units


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How to shard. Each field may be given to `shard` as a keyword.

    Args:
        units: At stage 3, what is gathered at a time; see `choose_units`. "auto": the items of ModuleLists,
            ModuleDicts and Sequentials.
        bucket: Bytes of parameters that are reduced as one, such as 10_000_000.
        param_dtype: Of the parameters in use, such as torch.bfloat16; the optimizer keeps the original ones.
        reduce_dtype: Of gradients while they are added up over microbatches and ranks; default: the parameters'.
        reduce: "mean" or "sum" over the ranks.
        atomic: For optimizers that are not element-wise (Muon, Adafactor): keeps every parameter whole on one rank.

    Raises:
        TypeError: A value of another type.
        ValueError: A value that is none of these.
    """

    units: Units = "auto"
    bucket: int = 10_000_000
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: str = "mean"
    atomic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bucket, int) or isinstance(self.bucket, bool):
            raise TypeError(f"bucket is {self.bucket!r}; give a whole number of bytes, such as 10_000_000")
        if not isinstance(self.atomic, bool):
            raise TypeError(f"atomic is {self.atomic!r}; give True or False")
        if self.bucket < 1:
            raise ValueError(f"bucket is {self.bucket} bytes; give 1 or more")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce is {self.reduce!r}; it can be 'mean' or 'sum'")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} is {dtype!r}; give a dtype, such as torch.bfloat16")
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
                raise ValueError(f"{name} is {dtype}; give a floating-point dtype of 16 bits or more")
