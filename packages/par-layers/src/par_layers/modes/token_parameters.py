"""Uses of parameters by every token: norms and look-ups, whose gradients are sums over tokens."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class TokenParameters:
    """Norms and look-ups by torch's own functions."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, mean: bool) -> Tensor:
        """Return the LayerNorm, or without a mean the RMSNorm, over the last dim of x.

        Args:
            x: Activations [..., features].
            weight: Factors [features].
            bias: Summands [features] of a LayerNorm; None for an RMSNorm.
            eps: Addend of the variance.
            mean: Whether the mean is subtracted.
        """
        if mean:
            return functional.layer_norm(x, weight.shape, weight, bias, eps)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def look_up(self, ids: Tensor, table: Tensor, padding: int | None = None) -> Tensor:
        """Return rows of a table, [..., features].

        Args:
            ids: Numbers of rows, int64 of any shape.
            table: The table [rows, features].
            padding: Number of a row that gets no gradient; None for no such row.
        """
        return functional.embedding(ids, table, padding)

    def add_positions(self, x: Tensor, table: Tensor, first: int) -> Tensor:
        """Add consecutive rows of a table [rows, features] to x [..., tokens, features], beginning with row `first`."""
        return x + table[first : first + x.shape[-2]]
