"""Attributes by which packages describe an object to each other without importing each other.

One package sets an attribute on a tensor, a module or a class, and another package reads it. Each name and the type of
its value are declared here, once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

    from .sharding.segments import Segments
    from .sharding.sharding import Sharding

Value = TypeVar("Value")


class Attribute(Generic[Value]):
    """An attribute that any object can have.

    Args:
        name: Name of the attribute, which begins with "par_".
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, owner: object) -> Value | None:
        """Return the value of an object or of its class, or None."""
        value: Value | None = getattr(owner, self.name, None)
        return value

    def is_on(self, owner: object) -> bool:
        """Return whether an object or its class has the attribute."""
        return hasattr(owner, self.name)

    def set(self, owner: object, value: Value) -> None:
        """Set the attribute of one object."""
        # `setattr` of a torch module would register a module as a child, and so change the names of its parameters.
        owner.__dict__[self.name] = value


# On tensors

SHARDING: Attribute["Sharding"] = Attribute("par_sharding")
"""How a tensor is sharded; set by `set_sharding`."""

SEGMENTS: Attribute["Segments"] = Attribute("par_segments")
"""Parameters that a flat tensor packs; set by `set_segments`."""

PART: Attribute["torch.Tensor"] = Attribute("par_part")
"""This rank's shard of a parameter that raises an error if a program reads it, such as a freed parameter of ZeRO."""

GRADIENT_ELSEWHERE: Attribute[str] = Attribute("par_gradient_elsewhere")
"""Tensor that has a parameter's gradient, in words; set by `set_gradient_elsewhere`."""

HAS_ALIAS: Attribute[bool] = Attribute("par_has_alias")
"""Whether a program has read or replaced `data` of a `WatchedWeight`, and so may write to it uncounted."""

LABEL: Attribute[str] = Attribute("par_label")
"""Contents of a communication buffer, in words; identical on every rank."""

# On modules

KEEP_DTYPE: Attribute[tuple[str, ...]] = Attribute("par_keep_dtype")
"""Names of a module's own parameters and buffers whose dtype no cast of the model may change."""

PRETRAINED: Attribute[Any] = Attribute("par_pretrained")
"""The Hugging Face Transformers model of which a module, such as a pipeline stage, holds parameters; None: no model."""

EXACT_GRADIENTS: Attribute[bool] = Attribute("par_exact_gradients")
"""Whether backward returns the gradients of a module's parameters in fp64, as multiples of the grid of `on_grid`."""

# On classes: methods that par-diagnosis calls if it finds `self` in the stack of a program that hangs

DOING: Attribute[Callable[[Any], str]] = Attribute("par_doing")
"""Method that returns what the object is doing, in words."""

WAITS_FOR: Attribute[Callable[[Any], tuple[int, ...]]] = Attribute("par_waits_for")
"""Method that returns the global ranks that the object waits for."""

# On modules of Python: global variables, which a sampler finds through the stack of a program that waits

WAIT_AXIS: Attribute[str] = Attribute("par_wait_axis")
"""Axis whose ranks the functions of a module wait for; "" if each has the process group in its variable `group`."""
