"""The model: a GPT on bytes, pre-norm, from plain torch.nn modules."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._options import ModelOptions

VOCABULARY = 256
"""Every byte is a token."""


class GPT(nn.Module):
    """Predicts the next byte from up to `context` bytes.

    Source: Radford et al. 2019 (GPT-2); initialisation as there.

    Args:
        options: Width, layers, heads and context.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.options = options
        self.tokens = nn.Embedding(VOCABULARY, options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)
        self._initialise()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next byte at every place.

        Args:
            inputs: (batch, time) bytes as int64; time is at most `context`.

        Returns:
            (batch, time, 256).
        """
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal with 0.02; what adds to the residual stream is scaled down, for it is added 2 * layers times."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention.output.weight", "contract.weight"))
                parameter.normal_(std=0.02 / math.sqrt(2 * self.options.layers) if residual else 0.02)
            elif name.endswith("bias"):
                parameter.zero_()


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(options.width)
        self.attention = Attention(options)
        self.mlp_norm = nn.LayerNorm(options.width)
        self.expand = nn.Linear(options.width, 4 * options.width)
        self.contract = nn.Linear(4 * options.width, options.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        expanded = functional.gelu(self.expand(self.mlp_norm(hidden)))
        contracted: Tensor = self.contract(expanded)
        return hidden + contracted


class Attention(nn.Module):
    """Causal self-attention over the heads."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.query_key_value = nn.Linear(options.width, 3 * options.width)
        self.output = nn.Linear(options.width, options.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = hidden.shape
        heads = self.query_key_value(hidden).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected
