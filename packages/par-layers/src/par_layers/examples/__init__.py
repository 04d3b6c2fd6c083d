"""Models that show how a layer set is used; the tests prove them equal to one device."""

from .gpt import GPT, GPTStage
from .vit import ViT

__all__ = ["GPT", "GPTStage", "ViT"]
