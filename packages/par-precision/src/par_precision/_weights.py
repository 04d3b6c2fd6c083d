"""What an optimizer steps: where gradients are counted, and where numbers are."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._dtensor import local_gradient, local_gradients
from .norm.clip import clamp_, multiply_
from .norm.norm import Held
from .norm.ownership import Ownership
from .rounding.step import StochasticStep, stochastic_step_


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is done to gradients before the optimizer sees them.

    Args:
        factor: They are multiplied with this scalar; None leaves them.
        limit: Each element is then clipped to -limit .. limit; None leaves them.
    """

    factor: Tensor | None = None
    limit: float | None = None

    def apply_(self, tensors: Iterable[Tensor]) -> None:
        """In place, to the gradients of some tensors."""
        if self.factor is None and self.limit is None:
            return
        given = local_gradients(tensors)
        if self.factor is not None:
            multiply_(given, self.factor)
        if self.limit is not None:
            clamp_(given, self.limit)


class Weights(ABC):
    """What an optimizer steps. Who has fp32 copies beside the parameters overrides the rest too."""

    @abstractmethod
    def gradients(self) -> Held:
        """Those there are."""

    @abstractmethod
    def step(self, change: Change, number: int) -> None:
        """Changes the gradients and steps the optimizer; it is the `number`-th step."""

    def forget(self) -> None:  # noqa: B027 - as below
        """Drops what it made of gradients for a step that is not taken."""

    def zero_grad(self) -> None:  # noqa: B027 - nothing to do is right for most
        """Drops gradients that the optimizer does not hold itself."""

    def masters(self) -> list[Tensor]:
        """The fp32 copies, in the order of the parameters."""
        return []

    def publish(self) -> None:  # noqa: B027
        """Brings the copies to the parameters."""

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:  # noqa: B027
        """Mends what the optimizer has made of a state, by number of parameter, that it loaded."""


class Own(Weights):
    """The optimizer's tensors are stepped as they are: fp32 parameters, or what another package put there.

    Args:
        optimizer: The optimizer.
        ownership: Who counts what.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership) -> None:
        self._optimizer = optimizer
        self._counted = {tensor: ownership.of(tensor) for group in optimizer.param_groups for tensor in group["params"]}

    def gradients(self) -> Held:
        """Those there are."""
        held = self._counted.items()
        return [(counted, gradient) for tensor, counted in held if (gradient := local_gradient(tensor)) is not None]

    def step(self, change: Change, number: int) -> None:  # noqa: ARG002
        """Changes the gradients and steps the optimizer."""
        change.apply_(self._counted)
        self._optimizer.step()


class Rounded(Own):
    """Half-precision parameters without masters: a step is computed in fp32, then rounded stochastically.

    Args:
        optimizer: The optimizer.
        ownership: Who counts what.
        options: How it is rounded.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership, options: StochasticStep) -> None:
        super().__init__(optimizer, ownership)
        self._options = options

    def step(self, change: Change, number: int) -> None:
        """Steps the optimizer with the random numbers of this step, and with gradients that are changed in fp32."""
        stochastic_step_(self._optimizer, number, self._options, change.apply_)

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """The optimizer gives moments their parameter's dtype; here they get back the one that they were saved with."""
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        for number, slots in state.items():
            loaded = self._optimizer.state[tensors[number]]
            for slot, saved in slots.items():
                if isinstance(saved, Tensor) and saved.dtype != loaded[slot].dtype:
                    loaded[slot] = saved.to(loaded[slot].device, copy=True)
