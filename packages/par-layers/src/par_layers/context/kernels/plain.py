"""Attention by plain products, for what torch's kernels do not compute."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..pieces import Kind
from .kernel import BIASED, NOTHING, Visible, products, wide_dtype


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
