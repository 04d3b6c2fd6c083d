"""Exact mean over all items of a step, if losses are means over different numbers of items, such as tokens.

`scale` multiplies a loss with its weight, the number of its items, and divides it by a typical weight of the last step.
In `step`, the all-reduce of the squares also sums the ranks' weights over the group. The gradients, by then means over
the data ranks, are divided by the mean of the ranks' sums.
"""

import math

import torch
from torch import Tensor


class LossWeights:
    """Sums of the weights of losses over one step. Only `check` waits for the device.

    Args:
        device: Device of the sums.

    Attributes:
        typical: Power of two near the ranks' mean weight in the last step that had a weight, an fp64 scalar, equal on
            all ranks. Losses are multiplied by weight / typical, so that gradients stay within fp16.
        empty: Whether the weights of all losses of the last step were 0, though its gradients were finite: a bool
            scalar. None: the losses had no weights.
    """

    def __init__(self, device: torch.device) -> None:
        # Constants of the device: a number made in each step would be copied there, and wait for it.
        self._no, self._yes = (torch.full((), value, dtype=torch.float64, device=device) for value in (0.0, 1.0))
        self.typical = self._yes
        self._differed = torch.zeros((), dtype=torch.bool, device=device)
        self.empty: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Begin a step."""
        self._sum = self._no
        self._some_with, self._some_without = False, False  # losses with a weight, and losses without

    def count(self, weight: float | Tensor | None) -> Tensor | None:
        """Count a loss.

        Args:
            weight: The number of items that the loss is a mean of. None: it has no weight.

        Returns:
            Factor for the loss, an fp64 scalar; None if the loss has no weight.

        Raises:
            ValueError: A weight that is no number of items; or a step in which some losses have a weight and others
                have none.
        """
        if weight is None:
            if self._some_with:
                raise _mixture("this loss has no weight, and an earlier one since the last step has one")
            self._some_without = True
            return None
        number = _checked(weight)
        if self._some_without:
            raise _mixture(f"this loss has weight {weight}, and an earlier one since the last step has none")
        self._some_with = True
        self._sum = self._sum + number
        return number / self.typical

    def beside(self, squares: Tensor) -> Tensor:
        """Return this rank's numbers for the all-reduce of a step.

        Args:
            squares: Sum of this rank's squares, an fp64 scalar.

        Returns:
            (4) in fp64: squares, sum of weights, whether there were weights, whether there were losses without.
        """
        some_with, some_without = (self._yes if some else self._no for some in (self._some_with, self._some_without))
        return torch.stack((squares, self._sum, some_with, some_without))

    def divide_(self, totals: Tensor) -> Tensor | None:
        """End a step, and return the gradients' divisor, an fp64 scalar; None if this rank's losses had no weights.

        The mean is over the ranks with a loss: in a pipeline, only the last stage has a loss.

        Args:
            totals: Sum of all ranks' numbers, (4). If some ranks have losses with weights and other ranks have losses
                without, the squares become NaN, which skips the step.
        """
        some_without = self._some_without
        self.forget()
        self.empty = None
        if some_without and totals.is_cpu and not totals[2]:  # the usual step; a look at it is free there
            return None
        # From here on no value is looked at, only computed with: a look would wait for the device in every step.
        squares, weight, ranks_with, ranks_without = totals.unbind()
        differ = ranks_with * ranks_without > 0
        squares.masked_fill_(differ, math.nan)
        self._differed = self._differed | differ
        if some_without:
            return None
        # Where no rank had a weight, typical / typical leaves gradients as they are.
        mean = torch.where(ranks_with > 0, self.mean_of(weight, ranks_with), self.typical)
        divisor = mean / self.typical
        usable = (mean > 0) & (mean < math.inf) & ~differ
        self.empty = (mean == 0) & squares.isfinite()
        # A power of two changes only the exponents of gradients, so the scale of a loss costs no digits.
        self.typical = torch.where(usable, mean.log2().round().exp2(), self.typical)
        return divisor

    def mean_of(self, weight: Tensor, ranks: Tensor) -> Tensor:
        """Return the number by which the summed or averaged gradients must be divided.

        Args:
            weight: Sum of the weights of all ranks.
            ranks: Number of ranks that gave weights.
        """
        return weight / ranks

    def check(self) -> None:
        """Looks whether ranks differed in a step since the last look. Waits for the device.

        Raises:
            ValueError: Some ranks gave weights and others did not; on all of them.
        """
        if bool(self._differed):
            self._differed = torch.zeros_like(self._differed)
            raise ValueError(
                "some ranks of the group gave their losses a weight, and others gave theirs none, so the step was "
                "skipped; give every loss its number of items, 0 where there are none, or give none of them one"
            )


def _checked(weight: float | Tensor) -> float | Tensor:
    """Return a weight as a number, or as an fp64 scalar."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"the weight has shape {tuple(weight.shape)}; give one number of items for the loss")
        return weight.detach().reshape(()).double()
    if not 0 <= weight < math.inf:
        raise ValueError(f"the weight is {weight}; give the number of items that the loss is a mean of, 0 or more")
    return weight


def _mixture(what: str) -> ValueError:
    return ValueError(f"{what}; give every loss of a step its number of items, or none of them")
