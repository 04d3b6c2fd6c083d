"""A block of a decoder, of torch's own layers, since nn.Linear is what "fp8" converts."""

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and an MLP, each on a normed copy of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        parts = self.query_key_value(self.norms[0](hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(-2))
        inside: Tensor = self.contract(functional.gelu(self.expand(self.norms[1](hidden))))
        return hidden + inside
