"""Choice of the kernels for a device, a dtype and a head size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..pieces import Kind
from .flash import CpuFlash, CudaEfficient, CudaFlash
from .kernel import Kernel
from .plain import Math


@dataclass(frozen=True)
class Kernels:
    """Kernels for all kinds of pieces, for one device, dtype and head size.

    Args:
        plain: Kernel for full and causal pieces.
        masked: Kernel for pieces that need an additive mask.
    """

    plain: Kernel
    masked: Kernel

    @property
    def joins(self) -> frozenset[str]:
        """Shapes of masks that the plain kernel computes in one call, for the planner of pieces."""
        return self.plain.joins

    def of(self, kind: Kind) -> Kernel:
        """Return the kernel for pieces of a kind."""
        return self.masked if kind == "band" or kind in self.plain.biased else self.plain


def choose_kernels(q: Tensor, v: Tensor, kernel: str = "auto", block: int = 512) -> Kernels:
    """Return the fastest kernels that support the device, dtype and head sizes of the tensors.

    Args:
        q: Queries.
        v: Values.
        kernel: "auto", or "math" for plain matmuls only.
        block: Number of queries of a block of the "math" kernel.
    """
    device, dtype, head = q.device, q.dtype, q.shape[3]
    math = Math(block)
    # torch's flash kernels require values of the queries' head size.
    if kernel == "math" or head != v.shape[3]:
        return Kernels(math, math)
    if device.type == "cpu" and dtype in {torch.float64, torch.float32, torch.bfloat16, torch.float16}:
        return Kernels(CpuFlash(), CpuFlash())
    if device.type == "cuda":
        halves = dtype in {torch.bfloat16, torch.float16}
        masked: Kernel = (
            CudaEfficient() if (halves or dtype == torch.float32) and head * dtype.itemsize % 16 == 0 else math
        )
        # These are the limits of FlashAttention; torch would raise in its kernel.
        if halves and head % 8 == 0 and head <= 256:
            return Kernels(CudaFlash(), masked)
        return Kernels(masked, masked)
    return Kernels(math, math)


def check_kernel(kernel: object) -> None:
    """Raise ValueError for an unknown name of a kernel."""
    if kernel not in {"auto", "math"}:
        raise ValueError(f"kernel is {kernel!r}; it must be 'auto' or 'math'")
