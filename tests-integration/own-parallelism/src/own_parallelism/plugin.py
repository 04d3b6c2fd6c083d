"""The plugin: activations of a block are computed again in backward, instead of being kept."""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from par_train import Plugin, Strategy


class Recompute(Plugin):
    """Keeps the input of each block alone.

    Args:
        blocks: Names of the classes that are blocks.
    """

    name = "recompute"

    def __init__(self, blocks: Sequence[str] = ("Block",)) -> None:
        self.blocks = blocks

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Strategy) -> nn.Module:
        """Parameters and their names stay what they are."""
        del optimizer, strategy
        for module in model.modules():
            if type(module).__name__ in self.blocks:
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        return model
