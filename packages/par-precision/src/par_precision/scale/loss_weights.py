"""The exact mean over all items of a step: losses that are means over different numbers of tokens weigh by them.

scale   a loss is multiplied with its weight, divided by what was a typical one
step    each rank tells its sum of weights, beside its sum of squares, in the one all-reduce          (group)
        gradients, means over the data ranks by then, are divided by the mean of the ranks' sums
"""

import math

import torch
from torch import Tensor


class Items:
    """Counts what losses are means over, from one step to the next. Nothing waits for the device but `check`.

    Args:
        device: Of the sums.

    Attributes:
        typical: A power of two near the ranks' mean weight in the last step that had one, the same on all of them: an
            fp64 scalar. Losses are multiplied with weight / typical, so that gradients stay within fp16.
    """

    def __init__(self, device: torch.device) -> None:
        self._no, self._yes = (torch.full((), value, dtype=torch.float64, device=device) for value in (0.0, 1.0))
        self.typical = self._yes
        self._differed = torch.zeros((), dtype=torch.bool, device=device)
        self.forget()

    def forget(self) -> None:
        """Begins a step."""
        self._weight, self._weighed, self._unweighed = self._no, False, False

    def count(self, weight: float | Tensor | None) -> Tensor | None:
        """Takes in a loss.

        Args:
            weight: The number of its items; None: it is not weighed.

        Returns:
            What the loss is multiplied with, an fp64 scalar; None: nothing.

        Raises:
            ValueError: A weight that is no number of items; or some losses of a step have one and others have none.
        """
        given = None if weight is None else _checked(weight)
        if self._unweighed if given is not None else self._weighed:
            raise ValueError(
                f"this loss has weight {weight}, and others since the last step had {'none' if self._unweighed else ''}"
                f"{'one' if self._weighed else ''}; give every loss of a step its number of items, or none of them"
            )
        if given is None:
            self._unweighed = True
            return None
        self._weighed = True
        self._weight = self._weight + given
        return given / self.typical

    def beside(self, squares: Tensor) -> Tensor:
        """What this rank tells the others.

        Args:
            squares: The sum of its squares, an fp64 scalar.

        Returns:
            (4): squares, sum of weights, whether there were weights, whether there were losses without.
        """
        told = self._yes if self._weighed else self._no, self._yes if self._unweighed else self._no
        return torch.stack((squares, self._weight, *told))

    def divide_(self, totals: Tensor) -> Tensor | None:
        """Ends a step: what gradients are divided by, an fp64 scalar. None: by nothing, which the host knows.

        The mean is that of the ranks that had a loss: of a pipeline the last ones alone have.

        Args:
            totals: (4), the sum of what all ranks told. Squares become NaN, which skips the step, where some ranks gave
                weights and others losses without.
        """
        unweighed = self._unweighed
        self.forget()
        if unweighed and totals.is_cpu and not totals[2]:  # the usual step; a look at it is free there
            return None
        squares, weight, weighing, others = totals.unbind()
        differ = weighing * others > 0
        squares.masked_fill_(differ, math.nan)
        self._differed = self._differed | differ
        if unweighed:
            return None
        mean = torch.where(weighing > 0, weight / weighing, self.typical)
        divisor = mean / self.typical
        known = (mean > 0) & (mean < math.inf) & ~differ
        self.typical = torch.where(known, mean.log2().round().exp2(), self.typical)
        return divisor

    def check(self) -> None:
        """Raises if ranks differed in a step since the last look, on all of them.

        Raises:
            ValueError: They did.
        """
        if bool(self._differed):
            self._differed = torch.zeros_like(self._differed)
            raise ValueError(
                "some ranks of the group gave their losses a weight, and others gave theirs none, so the step was "
                "skipped; give every loss its number of items, 0 where there are none, or give none of them one"
            )


def _checked(weight: float | Tensor) -> float | Tensor:
    """A number, or an fp64 scalar."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"the weight has shape {tuple(weight.shape)}; give one number of items for the loss")
        return weight.detach().reshape(()).double()
    if not 0 <= weight < math.inf:
        raise ValueError(f"the weight is {weight}; give the number of items that the loss is a mean of, 0 or more")
    return weight
