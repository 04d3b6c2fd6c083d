"""Gradients of parameters that every token uses: exact sums of one sum for each chunk of a sequence.

A sum over tokens depends on their number. **Chunks** of a sequence have the same tokens on every topology, so that the
sum of a chunk has the same bits wherever it is computed. The sums of chunks are rounded to one grid and added in fp64,
in which their order does not matter. They stay partial over ranks that split the sequence, as in ordinary numerics.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from par_groups import EXACT_LIMIT, exact_sum, on_grid

from .product_1d import SEQUENCE
from .token_parameters import TokenParameters


@dataclass(frozen=True)
class ChunkSums:
    """Sums over the tokens of activations [B, s, ..., features], for gradients [features].

    Args:
        chunks: Number of chunks of this rank's tokens of a sequence.
        cut: Whether other ranks have other tokens of the same sequence.
    """

    chunks: int
    cut: bool

    def check(self, x: Tensor) -> None:
        """Check that activations consist of chunks.

        Raises:
            ValueError: Other ranks have other tokens, and the chunks of one rank would begin elsewhere.
        """
        tokens = x.shape[SEQUENCE] if x.dim() > 2 else 1
        if self.cut and tokens % self.chunks:
            raise ValueError(
                f"a rank has {tokens} tokens of a sequence, which do not divide into {self.chunks} chunks; pad the "
                "sequence, or use fewer lanes"
            )

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return the sum over all dims but the last, in fp64."""
        # A sequence that does not divide is split on no topology, so that any number of chunks has the same bits.
        divides = x.dim() > 2 and x.shape[SEQUENCE] % self.chunks == 0
        pieces = x.chunk(self.chunks, SEQUENCE) if divides else (x,)
        return exact_sum([piece.reshape(-1, x.shape[-1]).contiguous().float().sum(0) for piece in pieces])

    def scale(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x * weight + bias, with gradients of both in fp64.

        Args:
            x: Activations [B, s, ..., features].
            weight: Factors [features]; None for 1.
            bias: Summands [features]; None for 0.
        """
        if torch.is_grad_enabled():  # without gradients, as in generation, nothing is split
            self.check(x)
        scaled: Tensor = _Scale.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return scaled


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, sums: ChunkSums) -> Tensor:
        ctx.sums = sums
        # Only the gradient of a weight reads x.
        ctx.save_for_backward(None if weight is None else x, weight)
        y = x if weight is None else x * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = gradient if weight is None else (gradient * weight).to(gradient.dtype)
        of_weight = ctx.sums.of_tokens(gradient.float() * x.float()) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, ctx.sums.of_tokens(gradient) if ctx.needs_input_grad[2] else None, None


@dataclass(frozen=True)
class ChunkedParameters(TokenParameters):
    """Norms and look-ups whose gradients do not depend on the ranks that split a sequence.

    Args:
        sums: Sums over the tokens of this rank.
    """

    sums: ChunkSums

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, mean: bool) -> Tensor:
        """Return the norm. Its factors and summands are applied separately, because a fused norm sums all tokens."""
        normalize = functional.layer_norm if mean else functional.rms_norm
        return self.sums.scale(normalize(x, weight.shape, eps=eps), weight, bias)

    def look_up(self, ids: Tensor, table: Tensor, padding: int | None = None) -> Tensor:
        """Return rows of a table. The gradient of each token is rounded by itself."""
        rows: Tensor = _LookUp.apply(ids, table, padding)  # type: ignore[no-untyped-call]
        return rows

    def add_positions(self, x: Tensor, table: Tensor, first: int) -> Tensor:
        """Add consecutive rows of a table, by a look-up."""
        return x + self.look_up(torch.arange(first, first + x.shape[-2], device=x.device), table)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding: int | None) -> Tensor:
        ctx.shape, ctx.padding = table.shape, padding
        ctx.save_for_backward(ids)
        return functional.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            gradient = gradient.masked_fill((ids == ctx.padding).unsqueeze(-1), 0.0)
        # Numbers on one grid add up exactly, so the order of tokens with the same id does not matter.
        rows = on_grid(gradient).flatten(0, -2)
        summed = rows.new_zeros(ctx.shape).index_add_(0, ids.flatten(), rows)
        bound = rows.abs().sum(0)
        # Beyond the range of exact sums, numbers that are large enough for the check of the step to raise.
        return None, summed.add_(torch.where(bound < EXACT_LIMIT, 0.0, bound)), None
