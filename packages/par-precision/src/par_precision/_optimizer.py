"""The optimizer that `mixed` returns: scale, norm, clip and skip around the user's own.

step   gradients -> sum of squares of what this rank counts, in fp64
                 -> all-reduce of that one number                                              (group)
                 -> norm, whether it is finite, clip coefficient, all on the device
                 -> the user's optimizer, which divides by scale / coefficient and skips by itself if it is fused
                 -> loss scale and counters, on the device
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ._clip import clip_coefficient
from ._norm import total_norm
from ._policy import Policy
from ._scaling import Scaling
from ._schedule import Schedule
from ._weights import Change, Weights

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
    need one read of the host in each step.

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

    def __init__(  # noqa: PLR0913 - made by `mixed` alone
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses: masters and counts are made once.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"a param group of {len(param_group['params'])} tensors comes too late; add it before mixed()"
        )

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
        if extra is None:
            return
        self.scaling.load_state_dict(extra["scaling"])
        for master, saved in zip(self._weights.masters(), extra["masters"], strict=True):
            master.copy_(saved)
        self._weights.publish()

    # What a trainer calls

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a trainer or a pipeline that calls backward itself.

        Raises:
            TypeError: A loss of whole numbers.
        """
        return self.scaling.scaled(loss)

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """Scales a loss and runs its backward pass.

        Raises:
            TypeError: A loss of whole numbers.
        """
        with self._policy.backward():
            self.scale(loss).backward(**keywords)

    def schedule(self, scheduler: LRScheduler) -> Schedule:
        """An lr scheduler that stands still where a step was skipped; that is the one host read that it costs."""
        return Schedule(scheduler, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> Step:  # type: ignore[override]
        """Updates the weights, unless a gradient anywhere in the group is not finite. Collective over the group.

        Args:
            closure: Called first, once; it may compute gradients.

        Raises:
            RuntimeError: Too many skipped steps in a row, on all ranks of the group.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        held = self._weights.gradients()
        norm = total_norm(held, self._group, self._device)
        if self.scaling.scale is not None:
            norm /= self.scaling.scale.value
        step = Step(grad_norm=norm, skipped=norm.isfinite().logical_not_())
        if not self._waits():
            self._update(step)
        elif not bool(step.skipped):
            self._stepped |= self._given()
            self._update(step)
        self.last = step
        self.scaling.update(step.skipped)
        return step

    def _update(self, step: Step) -> None:
        """Steps the user's optimizer, which divides gradients and skips itself if it can."""
        factor = self._factor(step.grad_norm)
        if not self._fused() or self._clip.value is not None:
            change = Change(factor=factor, limit=self._clip.value)
            divisor = None
        else:
            change = Change()
            divisor = None if factor is None else factor.reciprocal().float()
        try:
            if self._fused():
                self.inner.grad_scale = divisor  # type: ignore[attr-defined]  # as torch's GradScaler does
                self.inner.found_inf = step.skipped.float()  # type: ignore[attr-defined]
            self._weights.step(change, self.scaling.steps)
        finally:
            for name in ("grad_scale", "found_inf"):
                self.inner.__dict__.pop(name, None)

    def _factor(self, norm: Tensor) -> Tensor | None:
        """What gradients are multiplied with, in fp64; None: nothing."""
        scale = None if self.scaling.scale is None else self.scaling.scale.value
        if self._clip.norm is None:
            return None if scale is None else scale.double().reciprocal()
        coefficient = clip_coefficient(norm, self._clip.norm)
        return coefficient if scale is None else coefficient / scale

    def _fused(self) -> bool:
        """Whether the optimizer's kernels take a divisor and skip."""
        supports = getattr(self.inner, "_step_supports_amp_scaling", False)
        return bool(supports) and all(group.get("fused", True) for group in self.param_groups)

    def _waits(self) -> bool:
        """Whether the host decides about a skip: where the optimizer cannot, or where it would do so wrongly.

        Fused SGD that skips a tensor's very first step keeps a momentum for it that nobody has written.
        """
        return not self._fused() or (isinstance(self.inner, torch.optim.SGD) and not self._given() <= self._stepped)

    def _given(self) -> set[int]:
        """The optimizer's tensors that have a gradient."""
        return {id(each) for group in self.param_groups for each in group["params"] if each.grad is not None}

    def _check_masters(self, saved: list[Tensor]) -> None:
        here = [tuple(each.shape) for each in self._weights.masters()]
        there = [tuple(each.shape) for each in saved]
        if here != there:
            raise ValueError(
                f"the state has {len(there)} masters, of shapes {there[:3]}..., and here are {len(here)}, of shapes "
                f"{here[:3]}...; load it with the same model, precision and ranks, or save with par-checkpoint"
            )
