"""What is kept for backward and what is computed again: the policies that `checkpoint_layers` takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from par_groups import parse_size


@dataclass(frozen=True)
class Layers:
    """Whole layers run again in backward; of each of them its inputs alone are kept.

    Args:
        every: Which ones: 1 for each of them, 2 for the first, the third and so on.

    Raises:
        ValueError: The number is below 1.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; give 1 for every layer, or more")


@dataclass(frozen=True)
class Drop:
    """The outputs of some modules are not kept; the modules are called again in backward, the rest of the layer is not.

    A module whose output nobody saves, or that cannot be called again, stays as it is; the table that `measure` prints
    says why.

    Args:
        which: Says of a module, by its name in the model and itself, whether its output is dropped.

    Raises:
        TypeError: It is no function.
    """

    which: Callable[[str, nn.Module], bool]

    def __post_init__(self) -> None:
        if not callable(self.which):
            raise TypeError(f"which is {self.which!r}; give a function of a module's name and the module")


@dataclass(frozen=True)
class Keep:
    """As much as a budget allows is kept; what costs least is computed again.

    Of each layer modules are dropped, or the layer as a whole runs again, such that all layers keep within the budget
    and take the fewest seconds. It is a budget of one forward: with several microbatches under way, of each of them.

    Args:
        budget: What all layers may keep: bytes, a text such as "6GB" or "512MiB", or a part from 0.0 to 1.0 of what
            they would keep by themselves. None: their inputs alone, until `set_budget` says more, by what `choices` has
            measured meanwhile.

    Raises:
        TypeError: It is neither a number nor a text.
        ValueError: The text says no size, or the number is out of range.
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
        """The budget in bytes.

        Args:
            everything: Bytes that the layers would keep by themselves.
        """
        if self.budget is None:
            return 0
        if isinstance(self.budget, str):
            return parse_size(self.budget)
        return int(self.budget * everything) if isinstance(self.budget, float) else self.budget


@dataclass(frozen=True)
class Ops:
    """Whole layers run again, but the results of some operations are kept: torch's selective checkpointing.

    Args:
        save: The operations whose results are kept, such as `torch.ops.aten.mm.default`; or a function of torch's
            `create_selective_checkpoint_contexts`, which says for each operation whether it is.

    Raises:
        TypeError: It is neither a list nor a function.
    """

    save: Sequence[Any] | Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.save) and not (isinstance(self.save, Sequence) and not isinstance(self.save, str)):
            raise TypeError(f"save is {self.save!r}; give a list of operations of torch.ops, or a function of them")


Policy: TypeAlias = str | Layers | Drop | Keep | Ops
"""What `checkpoint_layers` takes: "cheap", "layers", or one of these objects."""


def checked(policy: object) -> "Cheap | Layers | Drop | Keep | Ops | None":
    """A policy as an object.

    Raises:
        ValueError: It is none.
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
    """What "cheap" is: every candidate without a product, a convolution or attention is dropped."""
