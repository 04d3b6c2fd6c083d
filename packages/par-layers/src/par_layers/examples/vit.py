"""A small vision transformer, written once against a layer set; it runs in every mode."""

from torch import Tensor, nn

from par_layers import LayerSet

from .gpt import Block


class ViT(nn.Module):
    """Classifies images by a class token. Source: Dosovitskiy et al. 2020 (arXiv:2010.11929).

    Args:
        layers: The mode's layers.
        patch: Side of a patch.
        tokens: Number of patches, and one more for the class token.
        width: Features of the residual stream.
        heads: Number of attention heads.
        depth: Number of blocks.
        classes: Number of classes.
        channels: Channels of the images.
    """

    def __init__(  # noqa: PLR0917 - a model has its sizes
        self,
        layers: LayerSet,
        patch: int,
        tokens: int,
        width: int,
        heads: int,
        depth: int,
        classes: int,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.layers, self.classes = layers, classes
        self.patches = layers.PatchEmbedding(patch, channels, width)
        self.positions = layers.PositionEmbedding(tokens, width)
        self.blocks = nn.ModuleList(Block(layers, width, heads, heads, causal=False) for _ in range(depth))
        self.norm = layers.RMSNorm(width)
        self.head = layers.Classifier(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of the batch, split as the mode splits it, for full images [B, C, H, W]."""
        hidden = self.positions(self.patches(images))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.layers.first_token(self.norm(hidden)))
        return logits

    def loss(self, images: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the mean loss over all images, on every rank."""
        return self.layers.cross_entropy(self(images), target, classes=self.classes, label_smoothing=label_smoothing)
