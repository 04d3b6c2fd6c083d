"""Optimizer that `mixed` returns: scale, norm, clip and skip around the user's own optimizer.

A step has five phases:

1. Sum the squares of this rank's counted gradients in fp64, next to the weights of its losses.

2. All-reduce these four numbers over the group.

3. Compute the norm, whether it is finite, and the clip coefficient, on the device.

4. Run the user's optimizer. It divides by scale * mean weight / coefficient. A fused one also skips in its kernels.

5. Update loss scale and counters on the device.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, overload
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from par_groups import drop_reads_, is_called_by_state_dict_of_dcp, refuse_get_state_dict, zero_grad_

from ._dtensor import local_part
from ._policy import Policy
from ._sums import StepSums
from ._torch_private import takes_scale
from ._weights import Change, Weights
from .norm.clip import check_limit, clip_coefficient
from .norm.norm import counted_parts
from .scale.scaling import Scaling
from .scale.schedule import SkipAwareScheduler

Loss = TypeVar("Loss")

EXTRA = "par_precision"
"""The key in a state dict of what the user's optimizer does not know."""
AROUND = "par_precision"
"""The attribute of the user's optimizer that has the mixed one around it."""


class Step(NamedTuple):
    """Result of a step, as tensors on the device, so that only code that reads them waits.

    Attributes:
        grad_norm: Norm of all gradients of the model, unscaled and before clipping; an fp64 scalar.
        skipped: Whether the step was skipped because the norm was not finite; a bool scalar.
    """

    grad_norm: Tensor
    skipped: Tensor


class Clip(NamedTuple):
    """Clipping of gradients; at most one option is set.

    Args:
        norm: Largest norm of all gradients together. Default: no clipping by norm.
        value: Largest absolute value of an element. Default: no clipping by value.
    """

    norm: float | None
    value: float | None


class MixedOptimizer(Optimizer):
    """A wrapper of the user's optimizer that unscales and clips gradients and skips overflowing steps.

    Its param groups and state are the same objects as in the user's optimizer.

    Fused optimizers (`fused=True`) unscale, clip and skip inside their kernels, and the host never waits. With any
    other optimizer the host reads one flag of the device in each step; on a CPU this read costs nothing.

    Args:
        inner: Optimizer of the user.
        weights: Tensors that the optimizer steps.
        scaling: Loss scale, loss weights and counters.
        clip: Limits for gradients.
        policy: Contexts for forward and backward.
        group: Process group over which gradient norms and loss weights are summed. None: only this rank.
        device: Device of these sums.

    Attributes:
        inner: Optimizer of the user.
        group: Process group over which gradient norms and loss weights are summed. None: only this rank.
        scaling: Loss scale and number of skipped steps; can be saved like an lr scheduler.
        last: Result of the last step; None before the first step.
        sums: What the ranks sum in a step; `ExactSums.use` replaces it.
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
        self._weights, self._clip, self._policy, self.group = weights, clip, policy, group
        self.sums = StepSums()
        self._reads_freely = device.type == "cpu"  # the host need not wait
        self._have_momentum: set[int] = set()  # ids of the tensors that SGD has momentum for
        self._schedules: WeakSet[SkipAwareScheduler] = WeakSet()
        self.__setstate__({})  # makes room for hooks; Optimizer's constructor would make param groups of its own
        inner.__dict__[AROUND] = self

    # What a trainer calls

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Scale a loss and run its backward pass.

        Args:
            loss: A scalar.
            weight: The number of items, such as tokens, that the loss is a mean of; see `scale`.
            gradient: Argument of torch's `Tensor.backward`, like the next three.
            retain_graph: Whether to keep the graph for another backward.
            create_graph: Whether gradients have a graph of their own. Default: False.
            inputs: Tensors that receive gradients. Default: all leaves.

        Raises:
            TypeError: The loss has an integer dtype.
            ValueError: The weight is not a number of items, only some losses of the step have a weight, or there are
                several ranks and no group over which to sum the weights.
        """
        scaled = self.scale(loss, weight)
        # Backward adds to what it finds in `parameter.grad`, which may be the stand-in of an earlier pass.
        self._weights.take_stand_ins()
        with self._policy.backward():
            scaled.backward(gradient, retain_graph, create_graph, inputs=inputs)

    def scale(self, loss: Tensor, weight: float | Tensor | None = None) -> Tensor:
        """Return the loss times the loss scale, for a trainer or a pipeline that calls backward itself.

        With weights, the step turns gradients into exact means over all items: of all losses since the last step, on
        all ranks of the group. Average gradients over the data ranks as usual. The group must contain all data ranks,
        and ranks that share a replica of the model must pass the same weights. A rank whose batch has no items passes a
        loss of 0 and the weight 0. A rank without a loss, such as a pipeline's first, does not call this method.

        Args:
            loss: A scalar.
            weight: The number of items, such as tokens, that the loss is a mean of: a number, or a scalar tensor. None:
                every data rank and every loss counts the same, as under DDP.

        Raises:
            TypeError: The loss has an integer dtype.
            ValueError: A weight that is no number of items; weights for some losses of a step and none for others; or
                several ranks and no group to sum them over.
        """
        if weight is not None and self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"a loss with a weight in a world of {dist.get_world_size()} ranks needs those that share its mean; "
                "give mixed() a group, and replicas= if parameters are copies on it, as under DDP"
            )
        return self.scaling.scaled(loss, weight)

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> Step: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Update the weights, unless a gradient anywhere in the group is not finite. Collective over the group.

        Nothing is updated either if the weights of all losses are 0.

        Args:
            closure: Called first, once; it may compute gradients.

        Returns:
            The result of the step; with a closure its return value, such as the loss, as in torch's optimizers. `last`
            has the result of the step in both cases.

        Raises:
            ValueError: Some ranks gave losses a weight, and others did not; on all ranks of the group.
            RuntimeError: Too many skipped steps in a row, on all ranks of the group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norm, divisor = self._summed()
        step = Step(grad_norm=norm, skipped=(norm - norm) != 0)  # `isfinite` takes twice as many operations
        # The host decides about a skip on CPUs, and if the optimizer cannot decide or decides wrongly: fused SGD that
        # skips a tensor's very first step keeps a momentum for it that nobody has written.
        lacks_momentum = not self._momentum_wanted() <= self._have_momentum
        if not (self._reads_freely or not self._is_fused() or lacks_momentum):
            self._update(step, divisor, step.skipped.float())
        elif not bool(step.skipped):
            # Only the host knows here that the step really happens, so only here momentum is certain to be written.
            self._have_momentum |= self._momentum_wanted()
            self._update(step, divisor, None)
        else:
            self._weights.forget()
        self.last = step
        # The counters come after the step: the random numbers of a rounded step depend on the number of steps before.
        self.scaling.update(step.skipped, self.scaling.loss_weights.empty)
        for schedule in self._schedules:
            schedule.note(step.skipped)
        return step if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, the module's and the masters'.

        Args:
            set_to_none: Whether the optimizer's tensors lose their gradients instead of getting zeros.
        """
        zero_grad_(self.inner, set_to_none)
        self._weights.zero_grad()
        self.scaling.loss_weights.forget()

    def schedule(self, scheduler: LRScheduler) -> SkipAwareScheduler:
        """Return an lr scheduler that does not advance if every step since its last call was skipped.

        The schedule then matches the weights, whether you call it after each step or after each epoch. Each call of its
        `step` reads one number from the device.

        Args:
            scheduler: Scheduler of this optimizer or of the user's optimizer.
        """
        schedule = SkipAwareScheduler(scheduler)
        self._schedules.add(schedule)
        return schedule

    @property
    def clip_norm(self) -> float | None:
        """Largest norm that all gradients together keep in the steps to come, the same on all ranks; None: any norm.

        `mixed(clip_norm=...)` sets the first value. A trainer may set another value before each step.
        """
        return self._clip.norm

    @clip_norm.setter
    def clip_norm(self, norm: float | None) -> None:
        if norm is not None:
            check_limit(norm, "clip_norm")
            if self._clip.value is not None:
                raise ValueError(f"clip_norm={norm} and clip_value={self._clip.value}: give one of them")
        self._clip = Clip(norm=norm, value=self._clip.value)

    # What is saved

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's optimizer, with masters, scale and counters under a separate key.

        If parameters are DTensors, their masters and moments are DTensors, too. torch.distributed.checkpoint can then
        save them unsharded and load them on another number of ranks.
        """
        if self._weights.masters():
            refuse_get_state_dict(self.inner)
            drop_reads_(self.inner)
        extra = {"masters": self._weights.masters(), "scaling": self.scaling.state_dict()}
        state_dict = self.inner.state_dict()
        return {**state_dict, "state": self._weights.shown(state_dict["state"]), EXTRA: extra}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another run, and round its masters to the weights.

        The state of an optimizer without `mixed` is accepted, too: masters and scale then stay unchanged.

        Args:
            state_dict: Return value of `state_dict` of an optimizer, with or without `mixed`.

        Raises:
            ValueError: The number or the shapes of the masters differ.
        """
        extra = state_dict.get(EXTRA)
        if extra is not None:
            # The check comes before anything is loaded, so that a state that does not fit changes nothing.
            here = [tuple(master.shape) for master in self._weights.masters()]
            there = [tuple(master.shape) for master in extra["masters"]]
            if here != there:
                raise ValueError(
                    f"the state has {len(there)} masters, of shapes {there[:3]}..., and here are {len(here)}, of "
                    f"shapes {here[:3]}...; load it with the same model, precision and ranks, or save with "
                    "par-checkpoint"
                )
        state = self._weights.taken(state_dict["state"])
        self.inner.load_state_dict(
            {**{key: value for key, value in state_dict.items() if key != EXTRA}, "state": state}
        )
        self._weights.restore(state)
        # Losses before the load belong to a step that will never end.
        self.scaling.loss_weights.forget()
        if extra is None:
            return
        self.scaling.load_state_dict(extra["scaling"])
        for master, saved in zip(self._weights.masters(), extra["masters"], strict=True):
            local_part(master).copy_(local_part(saved))
        self._weights.publish()

    # What else torch asks of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The param groups of the user's optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the user's optimizer.

        Raises:
            ValueError: torch.distributed.checkpoint reads or sets it by parameter names, which masters and the shards
                of par-zero do not have.
        """
        # torch asks for `state` before it changes anything, and ends in a KeyError later. For an optimizer that holds
        # other tensors than the module's, `state_dict` raises the error that says so.
        if is_called_by_state_dict_of_dcp():
            self.state_dict()
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the user's optimizer."""
        return self.inner.defaults

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's optimizer, such as `train` and `eval` of schedule-free optimizers.

        A method may write the optimizer's tensors. After each call, parameters that are rounded copies are updated.
        """
        # While an object is unpickled it has no `inner` yet, and a plain access would call this method again.
        inner = self.__dict__.get("inner")
        if inner is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(inner, name)
        # Only methods can write tensors; a plain attribute is returned unchanged.
        if not inspect.ismethod(found):
            return found

        @wraps(found)
        def call_then_publish(*args: Any, **keywords: Any) -> Any:
            result = found(*args, **keywords)
            self._weights.publish()
            return result

        return call_then_publish

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error, because masters and counted elements are fixed by `mixed`.

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

    # The parts of a step

    def _summed(self) -> tuple[Tensor, Tensor | None]:
        """Return the norm of all gradients and their divisor, both fp64 scalars; the divisor is None if it is 1."""
        weights = self.scaling.loss_weights
        # The only collective of a step: squares and loss weights of all ranks, so that every rank decides alike.
        totals = self.sums.totals(counted_parts(self._weights.gradients()), weights, self.group)
        divisor = weights.divide_(totals)
        if self.scaling.scale is not None:
            scale = self.scaling.scale.value.double()
            divisor = scale if divisor is None else divisor * scale
        norm = totals[0].sqrt()
        return norm if divisor is None else norm / divisor, divisor

    def _update(self, step: Step, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step the user's optimizer with gradients that are unscaled and clipped, by its kernels if they support it.

        Args:
            step: Norm of the gradients.
            divisor: Divisor that unscales the gradients. None: no division.
            found_inf: Scalar that is 1 if the optimizer's kernels must skip. None: the host has decided against a skip.
        """
        if self._clip.norm is None:
            factor = None if divisor is None else divisor.reciprocal()
        else:
            factor = clip_coefficient(step.grad_norm, self._clip.norm)
            factor = factor if divisor is None else factor / divisor
        # Kernels only divide, so gradients with a limit for their elements are changed before the step.
        fused = self._is_fused()
        in_kernels = fused and self._clip.value is None
        grad_scale = factor.reciprocal().float() if in_kernels and factor is not None else None
        # A factor of 0, as after clipping an infinite norm, has an infinite reciprocal.
        if grad_scale is not None and self._reads_freely and not grad_scale.isfinite():  # kernels would divide to zero
            in_kernels, grad_scale = False, None
        change = Change() if in_kernels else Change(factor=factor, limit=self._clip.value)
        try:
            if fused:
                self.inner.grad_scale = grad_scale  # type: ignore[attr-defined]  # as torch's GradScaler does
                self.inner.found_inf = found_inf  # type: ignore[attr-defined]
            self._weights.step(change, self.scaling.steps)
        finally:
            # A later step without these values must not find those of this one.
            for name in ("grad_scale", "found_inf"):
                self.inner.__dict__.pop(name, None)

    def _is_fused(self) -> bool:
        """Return whether the optimizer's kernels accept a divisor and a skip."""
        return takes_scale(self.inner) and all(group.get("fused", True) for group in self.param_groups)

    def _momentum_wanted(self) -> set[int]:
        """Return the ids of the tensors that SGD is about to step."""
        if self._reads_freely or not isinstance(self.inner, torch.optim.SGD):
            return set()
        return {id(tensor) for group in self.param_groups for tensor in group["params"] if tensor.grad is not None}
