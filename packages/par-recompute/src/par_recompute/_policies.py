"""Policies of `checkpoint_layers`: which activations are saved for backward and which are recomputed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from par_groups import parse_size


@dataclass(frozen=True)
class Layers:
    """Policy that saves only the inputs of layers and runs the complete layers again in backward.

    Args:
        every: Stride over the layers; 1 recomputes each layer, 2 the first, the third and so on. Default: 1.

    Raises:
        ValueError: The number is below 1.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; give 1 for every layer, or more")


@dataclass(frozen=True)
class Drop:
    """Policy that drops the outputs of chosen modules and calls only these modules again in backward.

    A chosen module stays as it is if its output is not saved or if it cannot be called again. The table that `measure`
    prints lists the reason.

    Args:
        which: Function of a module's name in the model and the module; returns True if the module's output is dropped.

    Raises:
        TypeError: `which` is not callable.
    """

    which: Callable[[str, nn.Module], bool]

    def __post_init__(self) -> None:
        if not callable(self.which):
            raise TypeError(f"which is {self.which!r}; give a function of a module's name and the module")


@dataclass(frozen=True)
class Keep:
    """Policy that saves as many activations as a budget allows and recomputes the cheapest rest.

    Each layer drops some modules or runs again completely. The plan keeps the sum over all layers within the budget and
    minimizes the time of recomputation. The budget holds for one forward: several microbatches in flight take as many
    times the budget.

    Args:
        budget: Limit for the saved activations of all layers: bytes, a text such as "6GB" or "512MiB", or a fraction
            from 0.0 to 1.0 of the bytes saved without a policy. None: layers save only their inputs and measure the
            recomputation for `choices`, until `set_budget` sets a budget.

    Raises:
        TypeError: `budget` is neither a number nor a text.
        ValueError: The text is not a size, or the number is out of range.
    """

    budget: float | str | None

    def __post_init__(self) -> None:
        if self.budget is None:
            return
        if isinstance(self.budget, bool) or not isinstance(self.budget, int | float | str):
            raise TypeError(f"budget is {self.budget!r}; give bytes, a text such as '6GB', or a part such as 0.4")
        if isinstance(self.budget, str):
            parse_size(self.budget, name="budget", example="6GB")
        elif isinstance(self.budget, float) and not 0.0 <= self.budget <= 1.0:
            raise ValueError(f"budget is {self.budget}; a part is from 0.0 to 1.0, and bytes are an int")
        elif self.budget < 0:
            raise ValueError(f"budget is {self.budget} bytes; give 0 or more")

    def bytes_of(self, everything: int) -> int:
        """Return the budget in bytes.

        Args:
            everything: Bytes that the layers save without a policy.
        """
        if self.budget is None:
            return 0
        if isinstance(self.budget, str):
            return parse_size(self.budget)
        return int(self.budget * everything) if isinstance(self.budget, float) else self.budget


@dataclass(frozen=True)
class Ops:
    """Policy that runs complete layers again but saves the results of some operations (selective checkpointing).

    Args:
        save: Operations whose results are saved, such as `torch.ops.aten.mm.default`; or a policy function for torch's
            `create_selective_checkpoint_contexts`.

    Raises:
        TypeError: `save` is neither a list nor a function.
    """

    save: Sequence[Any] | Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.save) and not (isinstance(self.save, Sequence) and not isinstance(self.save, str)):
            raise TypeError(f"save is {self.save!r}; give a list of operations of torch.ops, or a function of them")


Policy: TypeAlias = str | Layers | Drop | Keep | Ops
"""Accepted forms of the `policy` argument: "cheap", "layers", or a policy object."""


def checked(policy: object) -> "Cheap | Layers | Drop | Keep | Ops | None":
    """Return a policy as an object.

    Raises:
        ValueError: The argument is not a policy.
    """
    if policy == "cheap":
        return Cheap()
    if policy == "layers":
        return Layers()
    if policy is None or isinstance(policy, Layers | Drop | Keep | Ops):
        return policy
    raise ValueError(f"policy is {policy!r}; it can be None, 'cheap', 'layers', Layers, Drop, Keep or Ops")


@dataclass(frozen=True)
class Cheap:
    """Policy "cheap": drop every candidate module that runs no matmul, convolution or attention."""
