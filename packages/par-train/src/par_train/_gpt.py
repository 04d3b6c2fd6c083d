"""The model: a GPT on bytes, pre-norm, written once against a layer set, so it runs under every tensor mode."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from par_layers import LayerSet, initialize, layer_set, normal

from ._options import ModelOptions

VOCABULARY = 256
"""Every byte is a token."""


class GPT(nn.Module):
    """Predicts the next byte from up to `context` bytes.

    Source: Radford et al. 2019 (GPT-2); initialisation as there.

    Args:
        options: Width, layers, heads and context.
        layers: The layers of a tensor mode; None for one device.
        seed: Of the weights, which are the same in every mode; None leaves zeros, for weights that are loaded next.
        device: Where the weights lie; default: the CPU.
    """

    def __init__(
        self,
        options: ModelOptions,
        layers: LayerSet | None = None,
        *,
        seed: int | None = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.layers = layers or layer_set(None)
        self.tokens = self.layers.VocabEmbedding(VOCABULARY, options.width, init=normal(0.02))
        self.positions = self.layers.PositionEmbedding(options.context, options.width, init=normal(0.02))
        self.blocks = nn.ModuleList(Block(options, self.layers) for _ in range(options.layers))
        self.norm = self.layers.LayerNorm(options.width)
        self.head = self.layers.VocabClassifier(options.width, VOCABULARY, init=normal(0.02))
        initialize(self, seed, device=device)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next byte at every place, in the layout of the tensor mode.

        Args:
            inputs: (batch, time) bytes as int64, whole; time is at most `context`.

        Returns:
            (batch, time, 256) on one device.
        """
        hidden = self.positions(self.tokens(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats a byte, on every rank of the tensor group; targets of -100 do not count.

        Args:
            logits: What `forward` gave.
            targets: (batch, time) bytes as int64, whole.
        """
        return self.layers.cross_entropy(logits, targets, classes=VOCABULARY)


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, options: ModelOptions, layers: LayerSet) -> None:
        super().__init__()
        width = options.width
        residual = normal(0.02 / math.sqrt(2 * options.layers))  # what is added 2 * layers times starts smaller
        self.layers, self.head = layers, width // options.heads
        self.attention_norm = layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, 3 * width, blocks=3, unit=self.head, init=normal(0.02))
        self.output = layers.RowLinear(width, width, init=residual)
        self.mlp_norm = layers.LayerNorm(width)
        self.expand = layers.ColumnLinear(width, 4 * width, init=normal(0.02))
        self.contract = layers.RowLinear(4 * width, width, init=residual)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, time, width) to the same, in the residual layout."""
        query, key, value = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        hidden = hidden + self.output(self.layers.attention(query, key, value, head=self.head, causal=True))
        contracted: Tensor = self.contract(functional.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted
