"""Tensors that an optimizer steps, behind one interface: fp32 tensors, rounded ones, or (in `_masters`) fp32 copies."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ._dtensor import local_gradient, local_gradients
from .norm.clip import clamp_, multiply_
from .norm.norm import CountedGradients
from .norm.ownership import Ownership
from .rounding.step import StochasticStep, stochastic_step_


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change that gradients go through before the optimizer sees them.

    Args:
        factor: A scalar that they are multiplied with. None leaves them.
        limit: Largest absolute value that an element keeps after that. None leaves them.
    """

    factor: Tensor | None = None
    limit: float | None = None

    def apply_(self, tensors: Iterable[Tensor]) -> None:
        """Changes the gradients of some tensors, in place."""
        if self.factor is None and self.limit is None:
            return
        # The local parts of DTensors: a factor is a number, so no rank needs another's elements.
        gradients = local_gradients(tensors)
        if self.factor is not None:
            multiply_(gradients, self.factor)
        if self.limit is not None:
            clamp_(gradients, self.limit)


class Weights(ABC):
    """Tensors that an optimizer steps. Subclasses with fp32 copies override more than the abstract methods."""

    @abstractmethod
    def gradients(self) -> CountedGradients:
        """Return the existing gradients, and which elements this rank counts of each."""

    @abstractmethod
    def step(self, change: Change, number: int) -> None:
        """Change the gradients and step the optimizer.

        Args:
            change: Change of the gradients before the step.
            number: Number of the step.
        """

    def take_stand_ins(self) -> None:  # noqa: B027 - as below
        """Remove what stands in `parameter.grad` for gradients elsewhere, before a backward pass adds to it."""

    def forget(self) -> None:  # noqa: B027 - as below
        """Drop tensors that were computed from gradients for a skipped step."""

    def zero_grad(self) -> None:  # noqa: B027 - nothing to do is right for most
        """Drop gradients of tensors that the optimizer does not hold itself."""

    def masters(self) -> list[Tensor]:
        """Return the fp32 copies, in the order of their parameters."""
        return []

    def shown(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state in the form that a checkpoint stores.

        Args:
            state: The state of each tensor, by its number.
        """
        return {number: dict(slots) for number, slots in state.items()}

    def taken(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Undo `shown`: return the optimizer's own form of a state."""
        return {number: dict(slots) for number, slots in state.items()}

    def publish(self) -> None:  # noqa: B027
        """Round the copies to their parameters."""

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:  # noqa: B027
        """Repair the state after the optimizer has loaded it.

        Args:
            state: The state as it was saved, by number of parameter.
        """


class OwnWeights(Weights):
    """The optimizer's tensors are stepped as they are: fp32 parameters, or what another package put there.

    Args:
        optimizer: Optimizer of the user.
        ownership: Elements that this rank counts in a norm.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership) -> None:
        self._optimizer = optimizer
        self._counted = {tensor: ownership.of(tensor) for group in optimizer.param_groups for tensor in group["params"]}

    def gradients(self) -> CountedGradients:
        """Return the existing gradients, and which elements this rank counts of each."""
        every = self._counted.items()
        return [(counted, gradient) for tensor, counted in every if (gradient := local_gradient(tensor)) is not None]

    def step(self, change: Change, number: int) -> None:  # noqa: ARG002
        """Changes the gradients and steps the optimizer."""
        change.apply_(self._counted)
        self._optimizer.step()


class RoundedWeights(OwnWeights):
    """Half-precision parameters without masters: a step is computed in fp32, then rounded stochastically.

    Args:
        optimizer: Optimizer of the user.
        ownership: Elements that this rank counts in a norm.
        options: Options for rounding.
    """

    def __init__(self, optimizer: Optimizer, ownership: Ownership, options: StochasticStep) -> None:
        super().__init__(optimizer, ownership)
        self._options = options

    def step(self, change: Change, number: int) -> None:
        """Step the optimizer with the random numbers of this step, and with gradients that are changed in fp32."""
        stochastic_step_(self._optimizer, number, self._options, change.apply_)

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Give moments the dtype that they were saved with; the optimizer has given them their parameter's."""
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        for number, slots in state.items():
            loaded = self._optimizer.state[tensors[number]]
            for slot, saved in slots.items():
                if isinstance(saved, Tensor) and saved.dtype != loaded[slot].dtype:
                    loaded[slot] = saved.to(loaded[slot].device, copy=True)
