"""A layer that is described everywhere and built on the rank that runs it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Lazy:
    """A layer that is not there yet, so that a model larger than one rank's memory can be written down on all.

    Args:
        make: Makes the layer: a class, or any function.
        *args: The positional arguments that `make` is called with.
        **keywords: The keyword arguments that `make` is called with.

    Raises:
        TypeError: `make` cannot be called.

    Example:
        layers = [Lazy(nn.Linear, 512, 512) for _ in range(96)]
        stages = build_stage(layers, schedule("1f1b", 8, 32), rank)
    """

    def __init__(self, make: Callable[..., nn.Module], *args: Any, **keywords: Any) -> None:
        if not callable(make):
            raise TypeError(f"a Lazy layer is made by {make!r}, which cannot be called; give a class or a function")
        self._make, self._args, self._keywords = make, args, keywords

    def build(self) -> nn.Module:
        """Build the layer.

        Raises:
            TypeError: The result is not a module.
        """
        layer = self._make(*self._args, **self._keywords)
        if not isinstance(layer, nn.Module):
            raise TypeError(f"{self!r} gives a {type(layer).__name__}; a layer is an nn.Module")
        return layer

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the layer's parameters on the meta device, without memory, to count them."""
        with torch.device("meta"):
            layer = self.build()
        return layer.parameters()

    def __repr__(self) -> str:
        arguments = [*map(repr, self._args), *(f"{key}={value!r}" for key, value in self._keywords.items())]
        return f"Lazy({getattr(self._make, '__name__', self._make)}, {', '.join(arguments)})"
