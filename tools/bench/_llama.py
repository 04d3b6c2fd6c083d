"""Llamas to measure: their sizes, transformers' config of them, and the same model written against a layer set."""

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from par_layers import LayerSet

HEADS, KEY_HEADS = 8, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch.

    Args:
        layers: Number of layers.
        width: Features of a token.
        words: Size of the vocabulary.
        rows: Rows of the batch.
        length: Tokens in a row.
        turns: How often every contender runs.
    """

    layers: int
    width: int
    words: int
    rows: int
    length: int
    turns: int

    def described(self) -> str:
        """The sizes in words."""
        return f"{self.layers} layers of {self.width}, {self.words} words, {self.rows} x {self.length} tokens"

    def config(self, share: int = 1) -> transformers.LlamaConfig:
        """What transformers makes the model of.

        Args:
            share: Number of ranks; heads, MLPs and vocabulary are those that one of them has.
        """
        return transformers.LlamaConfig(
            vocab_size=self.words // share,
            hidden_size=self.width,
            head_dim=self.width // HEADS,
            intermediate_size=4 * self.width // share,
            num_hidden_layers=self.layers,
            num_attention_heads=HEADS // share,
            num_key_value_heads=KEY_HEADS // share,
            max_position_embeddings=512,
            eos_token_id=None,
        )


class Llama(nn.Module):
    """Predicts the next token. Source: Touvron et al. 2023 (LLaMA).

    q, k and v are one linear, gate and up another: a layer set has blocks for that, and each is one product and one
    all-reduce backward.

    Args:
        layers: The layers of a mode, or of one device.
        case: The sizes.
        share: Number of ranks; heads, MLPs and vocabulary are those that one of them has.
    """

    def __init__(self, layers: LayerSet, case: Case, share: int = 1) -> None:
        super().__init__()
        self.layers, self.vocabulary, self.head = layers, case.words // share, case.width // HEADS
        self.tokens = layers.VocabEmbedding(self.vocabulary, case.width)
        self.blocks = nn.ModuleList(
            Block(
                layers,
                case.width,
                head=self.head,
                heads=HEADS // share,
                key_heads=KEY_HEADS // share,
                inner=4 * case.width // share,
            )
            for _ in range(case.layers)
        )
        self.norm = layers.RMSNorm(case.width)
        self.classifier = layers.VocabClassifier(case.width, self.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Whole ids [B, S] to logits in the mode's own layout."""
        turns = rotations(ids.shape[1], self.head)
        hidden: Tensor = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden, turns)
        logits: Tensor = self.classifier(self.norm(hidden))
        return logits

    def loss(self, ids: Tensor) -> Tensor:
        """The mean over all tokens but the first of each row, each predicted from those before it."""
        target = functional.pad(ids[:, 1:], (0, 1), value=-100)
        return self.layers.cross_entropy(self(ids), target, classes=self.vocabulary)


class Block(nn.Module):
    """Attention and a gated MLP, each on a normed copy of the residual stream."""

    def __init__(self, layers: LayerSet, width: int, *, head: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.layers, self.head = layers, head
        sizes = [heads * head, key_heads * head, key_heads * head]
        self.attention_norm, self.mlp_norm = layers.RMSNorm(width), layers.RMSNorm(width)
        self.query_key_value = layers.ColumnLinear(width, sum(sizes), bias=False, blocks=sizes, unit=head)
        self.output = layers.RowLinear(heads * head, width, bias=False)
        self.gate_up = layers.ColumnLinear(width, 2 * inner, bias=False, blocks=2)
        self.down = layers.RowLinear(inner, width, bias=False)

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """The residual layout to the same."""
        q, k, v = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        q, k = rotated(q, self.head, turns), rotated(k, self.head, turns)
        hidden = hidden + self.output(self.layers.attention(q, k, v, head=self.head, causal=True))
        gate, up = self.gate_up.parts(self.gate_up(self.mlp_norm(hidden)))
        mixed: Tensor = hidden + self.down(functional.silu(gate) * up)
        return mixed


def rotations(length: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, 1, head] by which the features of a head turn at each position, as LLaMA has them."""
    angles = torch.outer(torch.arange(length).float(), 10_000.0 ** (-torch.arange(0, head, 2) / head))
    both = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return both.cos(), both.sin()


def rotated(x: Tensor, head: int, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys [b, S, heads * head], turned by their positions."""
    heads, (cosines, sines) = x.unflatten(-1, (-1, head)), turns
    first, second = heads.chunk(2, dim=-1)
    turned: Tensor = heads * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned.flatten(-2)
