"""`ExactSums`: what a `MixedOptimizer` sums over ranks, so that its steps have the same bits under every topology."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import agree

from .._sums import StepSums
from ..scale.loss_weights import LossWeights
from .grid import GridHooks
from .squares import exact_squares, squares_of

if TYPE_CHECKING:
    from .._optimizer import MixedOptimizer


MARGIN = 16.0
"""Number by which losses are divided further, so that a gradient may become as many times larger from step to step.

The scale of a loss comes from the step before. A spike of the loss would otherwise leave the range of exact sums, which
ends a run.
"""


class TotalWeights(LossWeights):
    """Weights of losses whose gradients are summed over data ranks rather than averaged.

    Every loss has a weight, 1 by default, and gradients are divided by the sum of all weights after the sum over ranks:
    the one division that all topologies have in common.

    Args:
        device: Device of the sums.
        losses: Number of losses of a step, over all data ranks.
        replicas: Number of data ranks.
        parts: Number of these ranks that split each sample, and each have a loss of it.
        group: Ranks that agree on the scale of the first step, if losses have weights then.
    """

    def __init__(
        self, device: torch.device, *, losses: int, replicas: int, parts: int, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(device)
        self._losses, self._replicas, self._group = losses, replicas, group
        # The losses of a sample's parts weigh 1 together, so that the scale, which a checkpoint stores, is the same for
        # every number of parts. A power of two, as the number of parts is, changes no bit of a gradient.
        self._weight = 1.0 / parts
        self.number = 0
        self.expect(self._weight)
        self._initial: Tensor | None = self.typical

    def expect(self, weight: float) -> None:
        """Set the scale of the first step's losses; later steps take it from the step before.

        Args:
            weight: A weight near that of a loss, identical on all ranks.
        """
        # The sum of all losses, so that gradients are near the mean's, well within the range of exact sums. A power of
        # two, so that it changes no bit of a gradient before the grid.
        total = max(weight, self._weight) * self._losses
        self.typical = torch.full_like(self.typical, 2.0 ** round(math.log2(total)))
        self._initial = None

    def count(self, weight: float | Tensor | None) -> Tensor | None:
        """Count a loss; without a weight it weighs 1, or its part of 1.

        The first loss with a weight is collective over the group.
        """
        if weight is not None and self.typical is self._initial:
            first = torch.as_tensor(weight, dtype=torch.float64, device=self.typical.device).reshape(()).clone()
            if self._group is not None and dist.get_world_size(self._group) > 1:
                dist.all_reduce(first, dist.ReduceOp.MAX, group=self._group)  # one fp64 number
            self.expect(float(first))
        self.number += 1
        factor = super().count(self._weight if weight is None else weight)
        return None if factor is None else factor / MARGIN

    def divide_(self, totals: Tensor) -> Tensor | None:
        """End a step, and return the divisor of gradients whose losses `count` has scaled."""
        divisor = super().divide_(totals)
        return None if divisor is None else divisor / MARGIN

    def mean_of(self, weight: Tensor, ranks: Tensor) -> Tensor:
        """Return the sum of the weights of all data ranks. Tensor and sequence ranks have given theirs as well."""
        # Multiplied first: whole numbers, so that the quotient is the exact sum.
        return weight * self._replicas / ranks


class ExactSums(StepSums):
    """Gradients, their norm and their mean as sums that do not depend on the order of ranks and losses.

    Call `attach` before the module is sharded, reduce gradients in fp64 by sum, and call `use` once `mixed` has made
    the optimizer. Then the weights after a step depend on the losses of the step, and not on which rank has which.

    Args:
        losses: Number of losses of a step, over all data ranks, each with a backward pass of its own.
        replicas: Number of data ranks.
        parts: Number of these ranks that split each sample, such as those of a sequence, and each have a loss of it. A
            power of two.

    Raises:
        ValueError: The losses do not divide among the data ranks.
    """

    def __init__(self, *, losses: int, replicas: int, parts: int = 1) -> None:
        if losses < 1 or losses % replicas:
            raise ValueError(
                f"{losses} losses a step do not divide among {replicas} data ranks; choose a multiple of {replicas}"
            )
        self._losses, self._replicas, self._parts = losses, replicas, parts
        self._hooks: list[GridHooks] = []

    @staticmethod
    def check(module: nn.Module) -> None:
        """Raise if the gradients of a module have as many bits as their sums.

        Raises:
            ValueError: A trained parameter is in fp64.
        """
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype == torch.float64:
                raise ValueError(
                    f"{name!r} is torch.float64, whose sums in fp64 depend on the order of ranks; exact sums need fp32 "
                    "or bf16; call float() of the model, or sum as usual (numerics='ordinary' of a Strategy)"
                )

    def attach(self, module: nn.Module) -> None:
        """Let each backward pass round the gradients of a module's parameters to one grid.

        Raises:
            ValueError: See `check`.
        """
        self.check(module)
        self._hooks.append(GridHooks(module, self._losses))

    def use(self, optimizer: "MixedOptimizer") -> None:
        """Let an optimizer of the attached modules sum exactly."""
        device = optimizer.scaling.loss_weights.typical.device
        optimizer.scaling.loss_weights = TotalWeights(
            device, losses=self._losses, replicas=self._replicas, parts=self._parts, group=optimizer.group
        )
        optimizer.sums = self

    def totals(self, parts: Sequence[Tensor], weights: LossWeights, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sums over ranks that a step needs. Collective: two fp64 numbers, three int64 and four fp64.

        Args:
            parts: The elements of the summed gradients that this rank counts.
            weights: The weights of the step's losses.
            group: Ranks that sum.

        Raises:
            ValueError: A gradient is too large for exact sums; on all ranks, before anything is updated.
        """
        device = weights.typical.device
        alone = group is None or dist.get_world_size(group) == 1
        zero = torch.zeros((), dtype=torch.float64, device=device)
        elements = torch.stack([zero, *(part.abs().amax().to(zero) for part in parts if part.numel())]).amax()
        maxima = torch.stack([elements, *(hooks.largest(device) for hooks in self._hooks)])
        # A backend's MAX may drop a NaN.
        maxima = torch.nan_to_num(maxima, nan=math.inf, posinf=math.inf)
        maxima = torch.stack((maxima[0], maxima[1:].amax()))
        if not alone:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)  # (2) in fp64
        top, excess = maxima.unbind()
        if 1 <= excess < math.inf:
            self._raise(float(excess), group)
        for hooks in self._hooks:
            hooks.forget()
        words = exact_squares(parts, top)
        losses = torch.full_like(top, weights.number)  # type: ignore[attr-defined]  # `use` has set these weights
        # The squares are summed exactly as words, so their place in this vector is empty until the end.
        others = torch.cat((weights.beside(torch.zeros_like(top)), losses[None]))
        if not alone:
            dist.all_reduce(words, group=group)  # (3) in int64
            dist.all_reduce(others, group=group)  # (5) in fp64: whole numbers, and weights that users choose
        others, losses = others[:4], others[4]
        weights.number = 0  # type: ignore[attr-defined]
        # Ranks that share a replica of the model give the same losses: all of those with losses stand for `replicas`.
        given = float(losses * self._replicas / others[2]) if others[2] > 0 else 0.0
        if given != self._losses:
            raise ValueError(
                f"this step had {given:g} losses, and canonical sums are scaled for {self._losses}; run "
                f"{self._losses // self._replicas} backward passes on each data rank before each step"
            )
        others[0] = torch.where(torch.isfinite(top), squares_of(words, top), math.nan)
        return others

    def _raise(self, excess: float, group: dist.ProcessGroup | None) -> None:
        here = [name for hooks in self._hooks for name in hooks.excess]
        for hooks in self._hooks:
            hooks.forget()
        # Each rank knows only its own parameters that exceed the limit, and all raise the same error.
        everywhere = agree(None, here, *(() if group is None else (group,)))
        names = sorted({name for each in everywhere.values() for name in each})
        raise ValueError(
            f"gradients of {', '.join(names[:3])}: an element is {excess:.3g} times as large as exact sums of "
            f"{self._losses} losses allow; use a smaller loss, fewer losses a step, or ordinary numerics"
        )
