"""One step of a run that survives the loss of ranks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Loss = Tensor | tuple[Tensor, Tensor | float]


class SurvivedStep:
    """One optimizer step of a run that survives the loss of ranks.

    Args:
        run: `Survivors.run`.
        number: The number of the step, from 0.

    Attributes:
        number: The number of the step, from 0.
    """

    def __init__(self, run: Callable[[int, Callable[[nn.Module, Any], Loss]], float], number: int) -> None:
        self._run, self.number = run, number
        self._has_begun = False  # and has not counted

    def run(self, loss_of: Callable[[nn.Module, Any], Loss]) -> float:
        """Do the step until it counts: read a batch, forward, backward, update. Collective.

        Args:
            loss_of: A function of the model and this rank's part of the batch. It returns the mean loss of its rows, or
                the sum of the losses and the number of items that they are of. It may run several times in one step.

        Returns:
            The mean loss over the whole batch.

        Raises:
            RuntimeError: No rank is left that holds the state; another rank has left the run with exit code 0; or this
                step has raised an error before.
        """
        if self._has_begun:
            # The first try has read rows, and perhaps sent a part of the gradients, which the other ranks wait for.
            raise RuntimeError(
                f"step {self.number} has raised an error on this rank, and cannot be run again; let the error end the "
                "process, and the other ranks continue without it"
            )
        self._has_begun = True
        loss = self._run(self.number, loss_of)
        self._has_begun = False
        return loss


def loss_and_items(given: Any, rows: int) -> tuple[Tensor, float]:
    """Return the sum of losses and the number of items from the result of `loss_of`.

    Args:
        given: The result.
        rows: The rows of the batch, of which a loss alone is the mean.

    Raises:
        TypeError: It is neither a loss nor a sum and a number.
        ValueError: The loss has several elements or no gradient, or the number is negative.
    """
    loss, items = given if isinstance(given, tuple) and len(given) == 2 else (given, rows)
    if not isinstance(loss, Tensor) or not isinstance(items, Tensor | float | int):
        raise TypeError(
            f"loss_of() returned a {type(given).__name__}: it is no loss; return the mean loss of the rows as a "
            "tensor, or a tuple of the sum of the losses and the number of items"
        )
    if loss.numel() != 1 or not loss.requires_grad or not float(items) >= 0:
        raise ValueError(
            f"loss_of() returned a loss of shape {tuple(loss.shape)} of {float(items):g} items, "
            f"requires_grad={loss.requires_grad}: a step needs one element with a gradient and 0 or more items; "
            "return .mean(), or .sum() and the number of items"
        )
    return loss if isinstance(given, tuple) else loss * rows, float(items)
