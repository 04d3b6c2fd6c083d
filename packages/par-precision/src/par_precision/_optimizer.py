"""The optimizer that `mixed` returns: scale, norm, clip and skip around the user's own.

step   gradients -> sum of squares of what this rank counts, in fp64, and beside it what its losses weigh
                 -> all-reduce of those four numbers                                           (group)
                 -> norm, whether it is finite, clip coefficient, all on the device
                 -> the user's optimizer, which divides by scale * mean weight / coefficient, and skips by itself if it
                    is fused
                 -> loss scale and counters, on the device
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._policy import Policy
from ._weights import Change, Weights
from .norm.clip import clip_coefficient
from .norm.norm import counted_parts
from .norm.sums import sum_of_powers
from .scale.scaling import Scaling
from .scale.schedule import Schedule

EXTRA = "par_precision"
"""The key in a state dict of what the user's optimizer does not know."""


class Step(NamedTuple):
    """What became of a step; tensors on the device, so that asking is what waits.

    Attributes:
        grad_norm: Of all gradients of the model, unscaled and before clipping; an fp64 scalar.
        skipped: Whether it was not finite, and nothing was changed; a bool scalar.
    """

    grad_norm: Tensor
    skipped: Tensor


class Clip(NamedTuple):
    """How gradients are clipped; at most one is given.

    Args:
        norm: Of all of them together.
        value: Of each element.
    """

    norm: float | None
    value: float | None


class MixedOptimizer(Optimizer):
    """A torch optimizer around the user's. Param groups and state are the user's optimizer's own objects.

    Fused optimizers (`fused=True`) unscale, clip and skip inside their kernels, and the host waits for nothing. Others
    need one read of the host in each step. On a CPU that is free, and spares kernels the question.

    Args:
        inner: The user's optimizer.
        weights: What it steps.
        scaling: The loss scale, and counters.
        clip: How gradients are clipped.
        policy: What backward runs in.
        group: The ranks that sum.
        device: Where they sum.

    Attributes:
        inner: The user's optimizer.
        scaling: The loss scale, and how many steps were skipped; can be saved like an lr scheduler.
        last: What became of the last step; None before the first.
    """

    def __init__(
        self,
        inner: Optimizer,
        weights: Weights,
        scaling: Scaling,
        *,
        clip: Clip,
        policy: Policy,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.inner, self.scaling = inner, scaling
        self.last: Step | None = None
        self._weights, self._clip, self._policy, self._group, self._device = weights, clip, policy, group, device
        self._reads_freely = device.type == "cpu"  # the host need not wait
        self._stepped: set[int] = set()  # the tensors that SGD has momentum for
        self.__setstate__({})  # hooks; Optimizer's own constructor would make param groups of its own

    # What torch asks of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the user's optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the user's optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the user's optimizer."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, the module's and the masters'."""
        self.inner.zero_grad(set_to_none)
        self._weights.zero_grad()
        self.scaling.items.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: masters and counts are made once.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"a param group with {sorted(param_group)} comes too late; add it before mixed()")

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixedOptimizer":
        raise TypeError(
            f"a mixed {type(self.inner).__name__} cannot be copied, nor pickled: hooks tie it to its module; save "
            "state_dict(), and call mixed() on a new module and optimizer"
        )

    def __reduce__(self) -> Any:
        return self.__deepcopy__({})

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's, with masters, scale and counters under a key of their own."""
        extra = {"masters": self._weights.masters(), "scaling": self.scaling.state_dict()}
        return {**self.inner.state_dict(), EXTRA: extra}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another run was, with the weights that its masters round to.

        The state of an optimizer that was not mixed fits too: masters and scale then stay what they are.

        Raises:
            ValueError: Other masters than there are here.
        """
        extra = state_dict.get(EXTRA)
        if extra is not None:
            self._check_masters(extra["masters"])
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != EXTRA})
        self._weights.restore(state_dict["state"])
        self.scaling.items.forget()
        if extra is None:
            return
        self.scaling.load_state_dict(extra["scaling"])
        for master, saved in zip(self._weights.masters(), extra["masters"], strict=True):
            master.copy_(saved)
        self._weights.publish()

    # What a trainer calls

    def scale(self, loss: Tensor, weight: float | Tensor | None = None) -> Tensor:
        """The loss times the loss scale, for a trainer or a pipeline that calls backward itself.

        With weights the step makes gradients exact means: over all items of all losses since the last step, of all
        ranks of the group that gave any. Gradients are to be averaged over data ranks as ever; the group must have all
        of these, and ranks that share a replica of the model give the same weights. A rank whose batch has no items
        gives a loss of 0 and weight 0; one that has no loss, such as a pipeline's first, does not call this.

        Args:
            loss: A scalar.
            weight: The number of items, such as tokens, that the loss is a mean of: a number, or a scalar tensor. None:
                every data rank and every loss counts the same, as under DDP.

        Raises:
            TypeError: A loss of whole numbers.
            ValueError: A weight that is no number of items; weights for some losses of a step and none for others; or
                several ranks and no group to sum them over.
        """
        if weight is not None and self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"a loss with a weight in a world of {dist.get_world_size()} ranks needs those that share its mean; "
                "give mixed() a group, and replicas= if parameters are copies on it, as under DDP"
            )
        return self.scaling.scaled(loss, weight)

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, **keywords: Any) -> None:
        """Scales a loss and runs its backward pass.

        Args:
            loss: A scalar.
            weight: As for `scale`.
            keywords: Of torch's `backward`.

        Raises:
            TypeError, ValueError: As for `scale`.
        """
        with self._policy.backward():
            self.scale(loss, weight).backward(**keywords)

    def schedule(self, scheduler: LRScheduler) -> Schedule:
        """An lr scheduler that stands still where a step was skipped; that is the one host read that it costs."""
        return Schedule(scheduler, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Step:  # type: ignore[override]
        """Updates the weights, unless a gradient anywhere in the group is not finite. Collective over the group.

        It does not, either, where the weights of all losses are 0.

        Args:
            closure: Called first, once; it may compute gradients.

        Raises:
            ValueError: Some ranks weighed losses, and others did not; on all ranks of the group.
            RuntimeError: Too many skipped steps in a row, on all ranks of the group.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        norm, divisor = self._summed()
        step = Step(grad_norm=norm, skipped=(norm - norm) != 0)  # `isfinite` takes twice as many operations
        if not self._waits():
            self._update(step, divisor, step.skipped.float())
        elif not bool(step.skipped):
            self._stepped |= self._with_momentum()
            self._update(step, divisor, None)
        else:
            self._weights.forget()
        self.last = step
        self.scaling.update(step.skipped)
        return step

    def _summed(self) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients, and what they are too large by, in fp64; None: nothing."""
        squares = sum_of_powers(counted_parts(self._weights.gradients()), 2, self._device)
        totals = self.scaling.items.beside(squares)
        if self._group is not None and dist.get_world_size(self._group) > 1:
            dist.all_reduce(totals, group=self._group)  # four fp64 numbers
        divisor = self.scaling.items.divide_(totals)
        if self.scaling.scale is not None:
            scale = self.scaling.scale.value.double()
            divisor = scale if divisor is None else divisor * scale
        norm = totals[0].sqrt()
        return norm if divisor is None else norm / divisor, divisor

    def _update(self, step: Step, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Steps the user's optimizer, which divides gradients itself if it can, and skips if it is told `found_inf`."""
        factor = self._factor(step.grad_norm, divisor)
        in_kernels = self._fused() and self._clip.value is None
        grad_scale = factor.reciprocal().float() if in_kernels and factor is not None else None
        if grad_scale is not None and self._reads_freely and not grad_scale.isfinite():  # kernels would divide to zero
            in_kernels, grad_scale = False, None
        change = Change() if in_kernels else Change(factor=factor, limit=self._clip.value)
        try:
            if self._fused():
                self.inner.grad_scale = grad_scale  # type: ignore[attr-defined]  # as torch's GradScaler does
                self.inner.found_inf = found_inf  # type: ignore[attr-defined]
            self._weights.step(change, self.scaling.steps)
        finally:
            for name in ("grad_scale", "found_inf"):
                self.inner.__dict__.pop(name, None)

    def _factor(self, norm: Tensor, divisor: Tensor | None) -> Tensor | None:
        """What gradients are multiplied with, in fp64; None: nothing."""
        if self._clip.norm is None:
            return None if divisor is None else divisor.reciprocal()
        coefficient = clip_coefficient(norm, self._clip.norm)
        return coefficient if divisor is None else coefficient / divisor

    def _fused(self) -> bool:
        """Whether the optimizer's kernels take a divisor and skip."""
        supports = getattr(self.inner, "_step_supports_amp_scaling", False)
        return bool(supports) and all(group.get("fused", True) for group in self.param_groups)

    def _waits(self) -> bool:
        """Whether the host decides about a skip: where the optimizer cannot or would do so wrongly, and on CPUs.

        Fused SGD that skips a tensor's very first step keeps a momentum for it that nobody has written.
        """
        return self._reads_freely or not self._fused() or not self._with_momentum() <= self._stepped

    def _with_momentum(self) -> set[int]:
        """The tensors that SGD is about to step."""
        if self._reads_freely or not isinstance(self.inner, torch.optim.SGD):
            return set()
        return {id(each) for group in self.param_groups for each in group["params"] if each.grad is not None}

    def _check_masters(self, saved: list[Tensor]) -> None:
        here = [tuple(each.shape) for each in self._weights.masters()]
        there = [tuple(each.shape) for each in saved]
        if here != there:
            raise ValueError(
                f"the state has {len(there)} masters, of shapes {there[:3]}..., and here are {len(here)}, of shapes "
                f"{here[:3]}...; load it with the same model, precision and ranks, or save with par-checkpoint"
            )
