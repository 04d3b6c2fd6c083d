"""Models of transformers, unchanged: their sizes from the model itself, which needs no memory and no weights.

`structure` finds the layers of a model, `shares` the parameters and traffic of a tensor rank, and `kept` the
activations that autograd saves. `shape` implements the planner's interface with them.
"""

from .shape import PretrainedShape

__all__ = ["PretrainedShape"]
