"""Models of transformers, unchanged: their sizes from the model itself, which needs no memory and no weights.

`structure` finds layers and ends of a model, `shares` what a tensor rank has of them and receives, `kept` what autograd
keeps of the model's own forward, and how its layers attend; `shape` answers the planner's questions from these.
"""

from .shape import PretrainedShape

__all__ = ["PretrainedShape"]
