"""A small GPT, written once against a layer set; it runs in every mode."""

from torch import Tensor, nn
from torch.nn import functional

from par_layers import LayerSet, Tokens, normal


class GPT(nn.Module):
    """Predicts the next token. Source: Radford et al. 2019 (GPT-2).

    Args:
        layers: The mode's layers.
        vocabulary: Number of tokens; they are 0 .. vocabulary - 1.
        width: Features of the residual stream.
        heads: Number of attention heads.
        depth: Number of blocks.
        length: The longest sequence.
        tied: Whether the logits share the embedding's table.
        key_heads: Number of key and value heads; default: as many as heads.
        dropout: Probability that an element is dropped.
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
    ) -> None:
        super().__init__()
        self.layers, self.vocabulary = layers, vocabulary
        self.tokens = layers.VocabEmbedding(vocabulary, width, init=normal(0.02))
        self.positions = layers.PositionEmbedding(length, width)
        self.dropout = layers.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(layers, width, heads, key_heads or heads, dropout) for _ in range(depth))
        self.norm = layers.LayerNorm(width)
        self.head = layers.VocabClassifier(width, vocabulary, tied=self.tokens if tied else None, init=normal(0.02))

    def forward(self, ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Whole ids [B, S] to logits in the mode's own layout.

        Args:
            ids: The ids; where the sequence is cut over ranks, those of this rank.
            tokens: How the batch was cut, and its documents, as `layers.context.cut` gives it; None for rows of one
                document.
        """
        hidden = self.dropout(self.positions(self.tokens(ids), tokens), tokens)
        for block in self.blocks:
            hidden = block(hidden, tokens)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(
        self, ids: Tensor, target: Tensor, label_smoothing: float = 0.0, *, tokens: Tokens | None = None
    ) -> Tensor:
        """The mean over all tokens, on every rank; of ids and targets as `forward` takes them."""
        logits = self(ids, tokens)
        return self.layers.cross_entropy(logits, target, classes=self.vocabulary, label_smoothing=label_smoothing)


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(
        self, layers: LayerSet, width: int, heads: int, key_heads: int, dropout: float = 0.0, *, causal: bool = True
    ) -> None:
        super().__init__()
        self.layers, self.head, self.causal = layers, width // heads, causal
        sizes = [width, key_heads * self.head, key_heads * self.head]
        self.attention_norm = layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, sum(sizes), blocks=sizes, unit=self.head)
        self.output = layers.RowLinear(width, width)
        self.mlp_norm = layers.LayerNorm(width)
        self.expand = layers.ColumnLinear(width, 4 * width)
        self.contract = layers.RowLinear(4 * width, width)
        self.dropout = layers.Dropout(dropout)

    def forward(self, hidden: Tensor, tokens: Tokens | None = None) -> Tensor:
        """The residual layout to the same; `tokens` as the whole model's."""
        q, k, v = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        mixed = self.layers.attention(q, k, v, head=self.head, causal=self.causal, tokens=tokens)
        hidden = hidden + self.dropout(self.output(mixed), tokens)
        expanded = functional.gelu(self.expand(self.mlp_norm(hidden)))
        contracted: Tensor = self.dropout(self.contract(expanded), tokens)
        return hidden + contracted
