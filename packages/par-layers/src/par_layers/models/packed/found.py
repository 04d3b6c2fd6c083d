"""A list of the experts in a model: those of `layers.MoE`, of the user's own code, and of a sharded model."""

from torch import nn

from ...experts.experts import Experts
from .forward import DealtForward


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have the packed weights of experts as parameters, by name.

    Args:
        model: A model or a part of it: `Experts` in it, and what `parallelize` or `pack_experts_` has made of its own.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Experts) or isinstance(vars(module).get("forward"), DealtForward)
    }
