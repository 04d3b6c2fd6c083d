"""The arithmetic that a model needs for a token: what MFU is the share of."""

from .model import PlannedModel
from .pipeline import Pipe, Place
from .shape import Part, Shape

_PLACE = Place(name="first", stages=(0,), kept=1, kept_last=1, received=0, neighbours=0)
_ALONE = Pipe(ranks=1, stages=1, idle=0.0, splits=False, places=(_PLACE,))


def model_flops(model: Shape | PlannedModel) -> float:
    """Floating-point operations of a whole model for one token, in forward and backward.

    Of causal attention half is counted, of experts those that a token goes to, and nothing that is computed again: so
    MFU tells how much of the devices' peak goes into what the model needs.

    Args:
        model: The sizes of a GPT, or a model as the planner takes it, such as `PretrainedShape`.

    Example:
        Run(folder, strategy, flops=model_flops(PretrainedShape(model, context=4096)))
    """
    if isinstance(model, Shape):
        return sum(model.flops(Part(blocks=model.layers, first=True, last=True)))
    return sum(model.flops(model.part(_ALONE, _PLACE)))
