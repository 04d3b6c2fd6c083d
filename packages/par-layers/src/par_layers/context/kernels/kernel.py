"""Interface of the kernels for one piece of attention, which also return the log-sum-exp of each query.

The backward of a kernel receives the output and the log-sum-exp of the *full* attention, over all pieces. The gradients
of the pieces then add up to the gradient of the full attention. Tensors are [B, S, heads, D], and kernels with heads
before tokens receive transposed views. With grouped-query attention a kernel receives the key heads without copies if
it supports them.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..pieces import Kind

BIASED = frozenset({"anti", "band"})
"""Kinds of pieces for which most kernels need an additive mask."""

NOTHING: frozenset[str] = frozenset()


class Documents(NamedTuple):
    """Documents of one kernel call, over all rows of a batch.

    Args:
        queries: Cumulative number of queries before each document, and the total, int32 [documents + 1].
        keys: Cumulative number of keys before each document, and the total, int32 [documents + 1].
        most_queries: Number of queries of the longest document.
        most_keys: Number of keys of the longest document.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Visible(NamedTuple):
    """Visible pairs of a query and a key in one piece, as a kernel receives them.

    Args:
        kind: Kind of the piece.
        bias: Additive mask [Q, K] of q's dtype, for kinds in the kernel's `biased`; else None.
        left: Number of keys that a query sees before its last visible key, for a window.
        documents: Visible pairs of each document of a piece that joins several. Each document has a mask of the piece's
            kind.
    """

    kind: Kind
    bias: Tensor | None = None
    left: int | None = None
    documents: Documents | None = None


class Kernel(Protocol):
    """Forward and backward of one piece of attention."""

    @property
    def name(self) -> str:
        """Name of the kernel, for messages."""
        ...

    @property
    def biased(self) -> frozenset[str]:
        """Kinds of pieces for which it needs an additive mask."""
        ...

    @property
    def joins(self) -> frozenset[str]:
        """Shapes of masks that it computes in one call, as in `pieces`: "causal", "window", "documents"."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """Compute attention of queries [B, Q, H, D] to keys and values [B, K, Hk, D]. Each query must see a key.

        Returns:
            Output [B, Q, H, D] of q's dtype, and log-sum-exp [B, H, Q], float32 or float64.
        """
        ...

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        visible: Visible,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; `out` and `lse` are the results of the full attention over all pieces."""
        ...


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which pieces accumulate: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def products(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.einsum` in the dtype of its factors, with autocast off because it would round them."""
    kind = a.device.type
    if not torch.amp.is_autocast_available(kind):  # as on the device meta, of which autocast knows no dtype
        return torch.einsum(equation, a, b)
    with torch.autocast(kind, enabled=False):
        return torch.einsum(equation, a, b)
