"""Kernels for one piece of attention. They are torch's own kernels, which also return the log-sum-exp of each query.

The backward of a kernel receives the output and the log-sum-exp of the *full* attention, over all pieces. The gradients
of the pieces then add up to the gradient of the full attention. Tensors are [B, S, heads, D], and kernels with heads
before tokens receive transposed views. With grouped-query attention a kernel receives the key heads without copies if
it supports them.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch_private import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)
from .pieces import Kind

KernelName = Literal["auto", "math"]

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


class CpuFlash:
    """Flash attention of the CPU, for all floating-point numbers. Takes shared key heads as they are."""

    name = "cpu flash"
    biased = BIASED
    joins = frozenset({"narrow"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`. Its causal mask is aligned at the top left, which is the same for squares."""
        _check(q, k)
        out, lse = flash_attention_on_cpu(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=visible.kind == "causal",
            attn_mask=visible.bias,
            scale=scale,
        )
        return out.transpose(1, 2), lse

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
        """See `Kernel`."""
        gradients = flash_attention_on_cpu_backward(
            gradient.transpose(1, 2),
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            out.transpose(1, 2),
            lse,
            0.0,
            visible.kind == "causal",
            attn_mask=visible.bias,
            scale=scale,
        )
        dq, dk, dv = (each.transpose(1, 2) for each in gradients)
        return dq, dk, dv


class CudaFlash:
    """FlashAttention on a GPU, for bfloat16 and float16, without additive masks. It accepts grouped key heads.

    Its causal masks and windows are aligned at the bottom right, so that a causal piece may have more keys than
    queries, and a window is one piece. It computes the documents of a packed sequence in one call.
    """

    name = "cuda flash"
    biased = NOTHING
    joins = frozenset({"causal", "window", "documents"})

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        _check(q, k)
        # The packed form of the kernel takes documents one after the other, without a batch dim.
        documents = visible.documents
        if documents is None:
            out, lse, *_ = flash_attention(
                q,
                k,
                v,
                None,
                None,
                q.shape[1],
                k.shape[1],
                0.0,
                visible.kind == "causal",
                False,  # no debug mask
                scale=scale,
                **self._window(q, k, visible),
            )
            return out, lse
        batch, queries = q.shape[:2]
        out, lse, *_ = flash_attention(
            *(x.flatten(0, 1) for x in (q, k, v)),
            *documents,
            0.0,
            visible.kind == "causal",
            False,  # no debug mask
            scale=scale,
            **self._window(q, k, visible),
        )
        return out.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1)

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
        """See `Kernel`."""
        numbers = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout, of which there is none
        documents = visible.documents
        if documents is None:
            dq, dk, dv = flash_attention_backward(
                gradient,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,
                None,
                q.shape[1],
                k.shape[1],
                0.0,
                visible.kind == "causal",
                numbers,
                numbers,
                scale=scale,
                **self._window(q, k, visible),
            )
            return dq, dk, dv
        gradients = flash_attention_backward(
            *(x.flatten(0, 1) for x in (gradient, q, k, v, out)),
            # The packed kernel has the heads first, and reads the log-sum-exp without looking at strides.
            lse.transpose(0, 1).flatten(1).contiguous(),
            *documents,
            0.0,
            visible.kind == "causal",
            numbers,
            numbers,
            scale=scale,
            **self._window(q, k, visible),
        )
        dq, dk, dv = (each.unflatten(0, (len(q), -1)) for each in gradients)
        return dq, dk, dv

    def _window(self, q: Tensor, k: Tensor, visible: Visible) -> dict[str, int | None]:
        """Return the number of keys that a query sees to the left and right of its aligned key; None is all keys."""
        if visible.kind == "band" or visible.bias is not None:
            raise ValueError(f"{self.name} takes no additive mask; compute the piece with another kernel")
        if visible.kind == "anti":  # from the first key on, which stands left of the aligned one where there are more
            return {"window_size_left": k.shape[1] - q.shape[1], "window_size_right": None}
        if visible.kind == "window":
            return {"window_size_left": visible.left, "window_size_right": 0}
        return {"window_size_left": None, "window_size_right": None}


class CudaEfficient:
    """Memory-efficient attention on a GPU, with additive masks, also for float32. Shared key heads are copied."""

    name = "cuda efficient"
    biased = BIASED
    joins = NOTHING

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        _check(q, k)
        out, lse, *_ = efficient_attention(
            q.transpose(1, 2),
            _expanded(k, q).transpose(1, 2),
            _expanded(v, q).transpose(1, 2),
            _for_heads(visible.bias, q),
            True,  # the log-sum-exp is wanted
            0.0,
            visible.kind == "causal",
            scale=scale,
        )
        return out.transpose(1, 2), lse[:, :, : q.shape[1]]  # it is longer, so that rows are aligned

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
        """See `Kernel`."""
        queries, number = q.shape[1], torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout
        dq, dk, dv, _ = efficient_attention_backward(
            gradient.transpose(1, 2),
            q.transpose(1, 2),
            _expanded(k, q).transpose(1, 2),
            _expanded(v, q).transpose(1, 2),
            _for_heads(visible.bias, q),
            out.transpose(1, 2),
            # The backward kernel reads the log-sum-exp in blocks of 32 queries, as its forward has allocated it.
            torch.nn.functional.pad(lse, (0, -queries % 32)),
            number,
            number,
            0.0,
            [True, True, True, False],
            visible.kind == "causal",
            scale=scale,
        )
        shared = (k.shape[2], -1)
        # Query heads that share a key head each computed a gradient for their copy of it.
        dk, dv = (each.transpose(1, 2).unflatten(2, shared).sum(3) for each in (dk, dv))
        return dq.transpose(1, 2), dk, dv


@dataclass(frozen=True)
class Math:
    """Attention by plain products, in blocks: for every device and dtype, and values of another head size.

    Args:
        block: Number of queries of a block; four times as many keys are.
    """

    block: int = 512
    name = "math"
    biased = BIASED
    joins = NOTHING

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel`. Inputs in a 16-bit dtype are computed in float32."""
        wide = wide_dtype(q.dtype)
        out = q.new_empty(q.shape[:3] + v.shape[3:])
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)
        values = v.to(wide)
        for rows, blocks in self._blocks(q.shape[1], k.shape[1], visible.kind):
            shape = (q.shape[0], k.shape[2], q.shape[2] // k.shape[2], rows.stop - rows.start)  # [B, Hk, H / Hk, q]
            # The smallest finite number instead of -inf: the difference of two infinities would be NaN for a block
            # without visible keys.
            largest = q.new_full((*shape, 1), torch.finfo(wide).min, dtype=wide)
            total, mixed = torch.zeros_like(largest), q.new_zeros((*shape, v.shape[3]), dtype=wide)
            for columns in blocks:
                scores = _scores(q, k, rows, columns, visible=visible, scale=scale)
                new = torch.maximum(largest, scores.amax(-1, keepdim=True))
                weights, kept = torch.exp(scores - new), torch.exp(largest - new)
                # Earlier blocks were scaled by an older maximum, and are rescaled to the new one.
                total = total * kept + weights.sum(-1, keepdim=True)
                mixed = mixed * kept + products("bhgqk,bkhd->bhgqd", weights, values[:, columns])
                largest = new
            out[:, rows] = (mixed / total).permute(0, 3, 1, 2, 4).flatten(2, 3)
            lse[:, :, rows] = (largest + total.log()).squeeze(-1).flatten(1, 2)
        return out, lse

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
        """See `Kernel`."""
        shared, wide = (k.shape[2], -1), wide_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(each, dtype=wide) for each in (q, k, v))
        keys, values = k.to(wide), v.to(wide)
        for rows, blocks in self._blocks(q.shape[1], k.shape[1], visible.kind):
            queries = q[:, rows].to(wide).unflatten(2, shared)
            upstream = gradient[:, rows].to(wide).unflatten(2, shared)  # [B, q, Hk, H / Hk, D]
            sums = lse[:, :, rows].unflatten(1, shared).unsqueeze(-1)
            # The gradient of a softmax subtracts, for each query, the mean of the gradients weighted by the
            # probabilities. That equals this product of output and its gradient.
            delta = (upstream * out[:, rows].to(wide).unflatten(2, shared)).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
            for columns in blocks:
                weights = torch.exp(_scores(q, k, rows, columns, visible=visible, scale=scale) - sums)
                dv[:, columns] += products("bhgqk,bqhgd->bkhd", weights, upstream)
                by_weight = products("bqhgd,bkhd->bhgqk", upstream, values[:, columns])
                by_score = weights * (by_weight - delta) * scale
                dq[:, rows] += products("bhgqk,bkhd->bqhgd", by_score, keys[:, columns]).flatten(2, 3)
                dk[:, columns] += products("bhgqk,bqhgd->bkhd", by_score, queries)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _blocks(self, queries: int, keys: int, kind: Kind) -> list[tuple[slice, list[slice]]]:
        """Blocks of queries, each with the blocks of keys of which it sees any."""
        # Wider blocks of keys mean fewer calls; the number of queries bounds the memory of a block.
        wide = 4 * self.block
        result = []
        for start in range(0, queries, self.block):
            stop = min(start + self.block, queries)
            first = start // wide * wide if kind == "anti" else 0
            last = stop + keys - queries if kind == "causal" else keys
            result.append((slice(start, stop), [slice(a, min(a + wide, keys)) for a in range(first, last, wide)]))
        return result


def _scores(q: Tensor, k: Tensor, rows: slice, columns: slice, *, visible: Visible, scale: float) -> Tensor:
    """Return scaled scores of a block of queries and a block of keys, [B, Hk, H / Hk, q, k]; -inf for hidden pairs."""
    wide = wide_dtype(q.dtype)
    queries, keys = q[:, rows].to(wide).unflatten(2, (k.shape[2], -1)), k[:, columns].to(wide)
    scores = products("bqhgd,bkhd->bhgqk", queries, keys) * scale
    if visible.bias is not None:
        scores += visible.bias[rows, columns]
    elif visible.kind == "causal":
        last = torch.arange(rows.start, rows.stop, device=q.device) + (k.shape[1] - q.shape[1])
        hidden = torch.arange(columns.start, columns.stop, device=q.device) > last[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    return scores


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


def _check(q: Tensor, k: Tensor) -> None:
    """Raise an error for inputs for which torch's kernels crash the process or silently return wrong results."""
    if not k.shape[1] or not q.shape[1]:
        raise ValueError("a piece of attention without queries or keys was to be computed; a bug of par-layers")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} heads do not divide by {k.shape[2]} key heads")


def _expanded(keys: Tensor, q: Tensor) -> Tensor:
    """Return one key head for each query head, with a copy if query heads share a key head."""
    copies = q.shape[2] // keys.shape[2]
    return keys if copies == 1 else keys.repeat_interleave(copies, 2)


def _for_heads(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """Return an additive mask [Q, K] as [B, H, Q, K] with rows aligned to 16 elements, as GPU kernels require."""
    if bias is None:
        return None
    columns = bias.shape[1]
    # Only the stride of the rows must be aligned, so the mask is a view of a wider tensor.
    aligned = torch.nn.functional.pad(bias, (0, -columns % 16))[:, :columns]
    return aligned.expand(q.shape[0], q.shape[2], -1, -1)
