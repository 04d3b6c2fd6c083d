"""A decoder as large as those that are trained, at the scale at which it can be run here, and the machine beside it.

Everything is divided alike: width, features of a head, vocabulary and tokens by the scale s. So every weight and every
activation has 1 / s**2 of its elements, and every product 1 / s**3 of its operations. The machine is as much slower, so
each operator and each message takes the seconds that it would take at full size. What has one number a feature, a token
or a head, such as a bias or a norm's statistics, weighs s times too much; it is little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from par_layers import LayerSet, initialize, layer_set
from par_layers.examples import GPT
from par_testing import Compute, Links, Strict

VOCABULARY, TOKENS = 51_200, 4_096  # tokens of a microbatch, which is one sequence


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of the shape of GPT-3's.

    Args:
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads.
        scale: What all lengths are divided by to run it here.
    """

    width: int
    depth: int
    heads: int
    scale: int

    @property
    def parameters(self) -> int:
        """Number of parameters at full size, without biases and norms."""
        return 12 * self.depth * self.width**2 + (2 * VOCABULARY + TOKENS) * self.width

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch at this scale."""
        return TOKENS // self.scale

    @property
    def vocabulary(self) -> int:
        """Number of tokens that there are at this scale."""
        return VOCABULARY // self.scale

    def bucket(self, full: int) -> int:
        """Bytes at this scale."""
        return full // self.scale**2

    def machine(self, links: Links, compute: Compute, alike: int) -> Strict:
        """Ranks that take as long for this scale as others would for the full size.

        Args:
            links: What joins the others.
            compute: How fast they compute.
            alike: How many of them each process stands for.
        """
        area, volume = self.scale**2, self.scale**3
        return Strict(
            links=Links(
                inside=(links.inside[0], links.inside[1] / area),
                across=(links.across[0], links.across[1] / area),
                ranks_per_host=links.ranks_per_host,
            ),
            compute=Compute(flops=compute.flops / volume, memory=compute.memory / area),
            alike=alike,
        )

    def decoder(self, layers: LayerSet | None = None) -> GPT:
        """The model, by the layers of a mode or of one device."""
        model = GPT(
            layer_set(None) if layers is None else layers,
            vocabulary=self.vocabulary,
            width=self.width // self.scale,
            heads=self.heads,
            depth=self.depth,
            length=self.tokens,
        )
        initialize(model, seed=0)
        return model

    def batch(self, microbatches: int = 1) -> tuple[Tensor, Tensor]:
        """Ids and targets, (microbatches, tokens) each."""
        ids = torch.randint(self.vocabulary, (microbatches, self.tokens + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def layers_of(decoder: GPT) -> list[nn.Module]:
    """The layers of a decoder one after the other: the embeddings, the blocks, the head."""
    first, last = nn.Sequential(decoder.tokens, decoder.positions), nn.Sequential(decoder.norm, decoder.head)
    return [first, *decoder.blocks, last]


def weights_of(size: Size) -> Sequence[float]:
    """What each of the layers computes, as a share of a block."""
    block = 12 * size.width**2 + 2 * TOKENS * size.width  # a token's products, and its attention
    return [0.01, *(1.0 for _ in range(size.depth)), VOCABULARY * size.width / block]
