"""A small GPT, written once against a layer set; it runs in every tensor mode."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from par_layers import LayerSet, Tokens, normal


class GPT(nn.Module):
    """Language model that predicts the next token. Source: Radford et al. 2019 (GPT-2).

    Args:
        layers: Layer set of a tensor mode.
        vocabulary: Number of tokens; they are 0 .. vocabulary - 1.
        width: Features of the residual stream.
        heads: Number of attention heads.
        depth: Number of blocks.
        length: Maximum number of tokens of a sequence.
        tied: Whether the classifier uses the embedding's table.
        key_heads: Number of key and value heads; default: `heads`.
        dropout: Probability that an element is dropped.
        mixture: Keywords of `LayerSet.MoE` after `hidden_size`, for a mixture of experts in place of each block's MLP;
            default: none.
    """

    def __init__(
        self,
        layers: LayerSet,
        vocabulary: int,
        width: int,
        heads: int,
        depth: int,
        length: int,
        *,
        tied: bool = False,
        key_heads: int | None = None,
        dropout: float = 0.0,
        mixture: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.vocabulary, self.length = layers, vocabulary, length
        self.tokens = layers.VocabEmbedding(vocabulary, width, init=normal(0.02))
        self.positions = layers.PositionEmbedding(length, width, init=normal(0.02))
        self.dropout = layers.Dropout(dropout)
        # The residual stream adds up 2 * depth outputs: smaller weights keep its variance from growing with the depth.
        residual = 0.02 / math.sqrt(2 * depth)
        self.blocks = nn.ModuleList(
            Block(layers, width, heads, key_heads or heads, dropout, residual=residual, mixture=mixture)
            for _ in range(depth)
        )
        self.norm = layers.LayerNorm(width)
        self.head = layers.VocabClassifier(width, vocabulary, tied=self.tokens if tied else None, init=normal(0.02))

    def forward(self, ids: Tensor, tokens: Tokens | None = None, mask: Tensor | None = None) -> Tensor:
        """Compute the logits of the next token at each position, in the layout of the tensor mode.

        Args:
            ids: Token ids, int64 [B, S]; this rank's part if the sequence is split over ranks.
            tokens: The split of the sequence and the documents in each row, from `layers.context.cut`; default: rows
                of one document.
            mask: False at padding, which the load balance of experts ignores, bool [B, S]; default: no padding.

        Returns:
            The logits, [B, S, vocabulary] on one device.
        """
        hidden = self.embed(ids, tokens)
        for block in self.blocks:
            hidden = block(hidden, tokens, mask)
        return self.classify(hidden)

    # A pipeline's first stage calls `embed`, its last one `classify`, and each calls its blocks between the two.

    def embed(self, ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Compute the input of the first block from ids and `tokens` as in `forward`."""
        embedded: Tensor = self.dropout(self.positions(self.tokens(ids), tokens), tokens)
        return embedded

    def classify(self, hidden: Tensor) -> Tensor:
        """Compute the logits from the output of the last block."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(
        self, ids: Tensor, target: Tensor, label_smoothing: float = 0.0, *, tokens: Tokens | None = None
    ) -> Tensor:
        """Compute the mean cross entropy over all tokens, on every rank, from ids and targets [B, S]."""
        logits = self(ids, tokens)
        return self.layers.cross_entropy(logits, target, classes=self.vocabulary, label_smoothing=label_smoothing)


class GPTStage(nn.Module):
    """A range of a GPT's blocks, with the embeddings before the first block and the classifier after the last.

    Args:
        model: The full GPT. It is no child module: its other blocks are not this stage's.
        run: Range of the blocks.
    """

    def __init__(self, model: GPT, run: range) -> None:
        super().__init__()
        self.is_first, self.is_last = run.start == 0, run.stop == len(model.blocks)
        self.blocks = model.blocks[run.start : run.stop]
        ends = [model.tokens, model.positions] if self.is_first else []
        self.ends = nn.ModuleList([*ends, *([model.norm, model.head] if self.is_last else [])])
        # Through __dict__, so that nn.Module does not register the model as a child.
        self.__dict__["model"] = model

    def forward(self, given: Tensor, tokens: Tokens | None = None, mask: Tensor | None = None) -> Tensor:
        """Compute hidden states, or logits on the last stage, from bytes or hidden states."""
        model: GPT = self.__dict__["model"]
        hidden = model.embed(given, tokens) if self.is_first else given
        for block in self.blocks:
            hidden = block(hidden, tokens, mask)
        return model.classify(hidden) if self.is_last else hidden


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts, each on a normed copy of the residual stream."""

    def __init__(
        self,
        layers: LayerSet,
        width: int,
        heads: int,
        key_heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = True,
        residual: float = 0.02,
        mixture: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layers, self.head, self.causal = layers, width // heads, causal
        # Queries, keys and values are one weight of three blocks, each of which is split by heads.
        sizes = [width, key_heads * self.head, key_heads * self.head]
        self.attention_norm = layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, sum(sizes), blocks=sizes, unit=self.head, init=normal(0.02))
        self.output = layers.RowLinear(width, width, init=normal(residual))
        self.mlp_norm = layers.LayerNorm(width)
        self.dropout = layers.Dropout(dropout)
        self.mixture = None if mixture is None else layers.MoE(width, init=normal(0.02), **mixture)
        if mixture is None:
            self.expand = layers.ColumnLinear(width, 4 * width, init=normal(0.02))
            self.activation = nn.GELU()  # a module, so that par-recompute finds it
            self.contract = layers.RowLinear(4 * width, width, init=normal(residual))

    def forward(self, hidden: Tensor, tokens: Tokens | None = None, mask: Tensor | None = None) -> Tensor:
        """Add attention and MLP to the residual stream; `tokens` and `mask` as in `GPT.forward`."""
        q, k, v = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        mixed = self.layers.attention(q, k, v, head=self.head, causal=self.causal, tokens=tokens)
        hidden = hidden + self.dropout(self.output(mixed), tokens)
        normed = self.mlp_norm(hidden)
        if self.mixture is not None:
            added: Tensor = self.dropout(self.mixture(normed, mask), tokens)
        else:
            added = self.dropout(self.contract(self.activation(self.expand(normed))), tokens)
        return hidden + added
