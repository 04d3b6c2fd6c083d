"""The model: a GPT on bytes, pre-norm, written once against a layer set, so it runs under every tensor mode."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from par_layers import ExpertConfig, LayerSet, LoadBalancing, MoE, RouterConfig, Tokens, initialize, layer_set, normal

from .options import ModelOptions

VOCABULARY = 256
"""Every byte is a token."""


class GPT(nn.Module):
    """Predicts the next byte from up to `context` bytes: the whole model, or what one pipeline rank has of it.

    A part keeps the names that its parameters have in the whole.

    Source: Radford et al. 2019 (GPT-2); initialisation as there.

    Args:
        options: Width, layers, heads, context, and whether tables are tied.
        layers: The layers of a tensor mode; None for one device.
        seed: Seed of the weights, which are the same in every mode; None leaves zeros, where weights are loaded next.
        device: Where the weights lie; default: the CPU.
        parts: The runs of blocks that this rank has; the one with the first block has the embeddings, the one with the
            last block the classifier. Default: all, in one part.
    """

    def __init__(
        self,
        options: ModelOptions,
        layers: LayerSet | None = None,
        *,
        seed: int | None = 0,
        device: torch.device | None = None,
        parts: Sequence[range] | None = None,
    ) -> None:
        super().__init__()
        self.options = options
        self.layers = layers or layer_set(None)
        runs = parts or [range(options.layers)]
        first = any(run.start == 0 for run in runs)
        last = any(run.stop == options.layers for run in runs)
        if first or (last and options.tied):
            self.tokens = self.layers.VocabEmbedding(VOCABULARY, options.width, init=normal(0.02))
        if first:
            self.positions = self.layers.PositionEmbedding(options.context, options.width, init=normal(0.02))
        self.blocks = nn.ModuleDict({str(i): Block(options, self.layers) for run in runs for i in run})
        if last:
            tied = self.tokens if options.tied else None
            self.norm = self.layers.LayerNorm(options.width)
            self.head = self.layers.VocabClassifier(options.width, VOCABULARY, tied=tied, init=normal(0.02))
        initialize(self, seed, device=device)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()

    def forward(
        self, inputs: Tensor, part: range | None = None, *, tokens: Tokens | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the next byte at every place, in the layout of the tensor mode.

        Args:
            inputs: (batch, time) bytes as int64, whole, of at most `context` bytes; where sequences are cut over ranks,
                this rank's. For a part that is not the first, what the one before gave.
            part: A run of blocks, to run that part alone.
            tokens: The documents of the rows, which do not see each other, and how the rows are cut over ranks, as
                `layers.context` says it; None for rows of one document.
            mask: False where a byte is padding, which does not count in the balance of experts, bool (batch, time);
                None: all count.

        Returns:
            (batch, time, 256) on one device. Of a part that is not the last, (batch, time, width).
        """
        run = range(self.options.layers) if part is None else part
        hidden = self.positions(self.tokens(inputs), tokens) if run.start == 0 else inputs
        for i in run:
            hidden = self.blocks[str(i)](hidden, tokens, mask)
        logits: Tensor = self.head(self.norm(hidden)) if run.stop == self.options.layers else hidden
        return logits

    def modules_of(self, part: range) -> list[nn.Module]:
        """What `forward` uses for a part."""
        blocks: list[nn.Module] = [self.blocks[str(i)] for i in part]
        first = [self.tokens, self.positions] if part.start == 0 else []
        last = [self.norm, self.head] if part.stop == self.options.layers else []
        return [*first, *blocks, *last]

    def loss(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """The mean cross entropy in nats a byte, on all ranks of a replica; targets of -100 do not count.

        Args:
            logits: What `forward` gave.
            targets: (batch, time) bytes as int64, whole; where sequences are cut over ranks, this rank's.
            reduction: "mean"; or "sum" over all bytes of the rows.
        """
        return self.layers.cross_entropy(logits, targets, classes=VOCABULARY, reduction=reduction)


class Block(nn.Module):
    """Attention and an MLP, or a mixture of experts, each on a normed copy of the residual stream."""

    def __init__(self, options: ModelOptions, layers: LayerSet) -> None:
        super().__init__()
        width = options.width
        self.mixture: MoE | None = None
        residual = normal(0.02 / math.sqrt(2 * options.layers))  # what is added 2 * layers times starts smaller
        self.layers, self.head = layers, width // options.heads
        self.attention_norm = layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, 3 * width, blocks=3, unit=self.head, init=normal(0.02))
        self.output = layers.RowLinear(width, width, init=residual)
        self.mlp_norm = layers.LayerNorm(width)
        if options.experts:
            self.mixture = layers.MoE(
                width,
                options.features,
                options.experts,
                options.top_k,
                num_shared_experts=options.shared,
                capacity_factor=options.capacity or None,
                balance=LoadBalancing(
                    aux_loss_coef=options.aux,
                    scope="sequence",
                    z_loss_coef=options.z,
                    bias_update_rate=options.bias_rate,
                ),
                init=normal(0.02),
                router=RouterConfig(scoring_func=options.score, correction_bias=options.bias_rate > 0),
                expert=ExpertConfig(activation="gelu"),
            )
            return
        self.expand = layers.ColumnLinear(width, 4 * width, init=normal(0.02))
        self.activation = nn.GELU()  # a module, so that `recompute` may call it again
        self.contract = layers.RowLinear(4 * width, width, init=residual)

    def forward(self, hidden: Tensor, tokens: Tokens | None = None, mask: Tensor | None = None) -> Tensor:
        """(batch, time, width) to the same, in the residual layout; `tokens` and `mask` as the whole model's."""
        query, key, value = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        mixed = self.layers.attention(query, key, value, head=self.head, causal=True, tokens=tokens)
        hidden = hidden + self.output(mixed)
        if self.mixture is not None:
            added: Tensor = self.mixture(self.mlp_norm(hidden), mask)
            return hidden + added
        contracted: Tensor = self.contract(self.activation(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted
