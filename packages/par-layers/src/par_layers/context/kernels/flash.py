"""torch's own kernels: flash attention of a CPU and of CUDA, and memory-efficient attention of CUDA."""

import torch
from torch import Tensor

from ..._torch_private import (
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
    flash_attention_on_cpu,
    flash_attention_on_cpu_backward,
)
from .kernel import BIASED, NOTHING, Visible


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
