"""Operations on all routers of a model: the factor of their losses, and the update of correction biases per step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from par_groups import ProcessGroups

from .balance import LossScale
from .router import Router


class RouterLosses:
    """Losses of all routers of a model: their common scale and their values.

    The state belongs to the model, so two models in one process are independent.

    Args:
        model: Model with routers, or a part of it such as a pipeline stage. Without routers nothing happens.

    Example:
        losses = RouterLosses(model)
        losses.scale = 0.5  # the main loss is halved, too
        (criterion(model(x), y) * 0.5).backward()
        losses.take()  # {"aux": ..., "imbalance": ...}
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = _routers(model)
        counters = [router.load for router in self._routers.values()]
        self._scale = counters[0].scale if counters else LossScale()
        for counter in counters:
            # One scale object for all routers, so that setting it once reaches each of them without a loop in every
            # step.
            counter.scale = self._scale

    @property
    def scale(self) -> Tensor:
        """Factor of the main loss in backward, one element; 1 at first.

        Set it when you multiply the main loss by a loss scale, a weight, or one over the number of microbatches.
        Backward reads it.
        """
        if self._scale.value is None:
            like = next((router.weight for router in self._routers.values()), torch.empty(()))
            dtype = torch.promote_types(like.dtype, torch.float32)  # the dtype of the routers' losses
            self._scale.value = torch.ones((), dtype=dtype, device=like.device)
        return self._scale.value

    @scale.setter
    def scale(self, value: Tensor | float) -> None:
        given = value.detach() if isinstance(value, Tensor) else torch.full_like(self.scale, value)
        if given.numel() != 1:
            raise ValueError(f"scale has {given.numel()} elements: it is one factor; pass one number")
        self._scale.value = given.reshape(())

    def take(self, groups: ProcessGroups | None = None) -> dict[str, Tensor]:
        """Return the losses and the load since the last call, without synchronizing with the device.

        Args:
            groups: Live groups of all ranks of the model, which then reduce their values: two small all-reduces over
                the world. Default: the values of this rank, without communication.

        Returns:
            "aux" and "z": losses that all routers added, coefficient included, mean over this rank's microbatches.
            "imbalance": tokens of the busiest expert over the mean of its layer, maximum over layers; tokens of all
            ranks if `update_correction_bias_` has ended a step, else of this rank. "dropped": routed tokens of this
            rank that a capacity dropped. Entries that were not measured are missing. With groups, fp64 scalars that are
            identical on all ranks: the mean of "aux" and "z", the highest "imbalance", and the sum of "dropped".
        """
        counters = [router.load for router in self._routers.values()]
        taken: dict[str, Tensor] = {}
        for name in ("aux", "z"):
            means = [counter.losses[name] / counter.microbatches for counter in counters if name in counter.losses]
            if means:
                taken[name] = torch.stack(means).sum()
        counts = [counter.counts if counter.total is None else counter.total for counter in counters]
        loads = [load for load in counts if load is not None]
        if loads:
            highest = [load.max() * len(load) / load.sum().clamp(min=1) for load in loads]
            taken["imbalance"] = torch.stack(highest).max()
        dropped = [counter.dropped for counter in counters if counter.dropped is not None]
        if dropped:
            taken["dropped"] = torch.stack(dropped).sum()
        for counter in counters:
            counter.total, counter.losses, counter.microbatches, counter.dropped = None, {}, 0, None
        if groups is None:
            return taken
        # Tensor ranks that do not split tokens drop the same ones.
        splits_tokens = any(counter.axes.partial for counter in counters)
        return _reduced(taken, groups, copies=1 if splits_tokens else groups.size("tensor"))

    def load(self, groups: ProcessGroups | None = None) -> dict[str, Tensor]:
        """Return the tokens of each expert in the last step, summed over all ranks, by name of the router.

        Args:
            groups: Live groups. The routers of all stages of the pipeline are then included, on the CPU, by an
                all-gather over its ranks. Default: the routers of this rank.

        Returns:
            int64 [E] per router. Routers for which `update_correction_bias_` has not yet ended a step are missing.
        """
        latest = {name: router.load.latest for name, router in self._routers.items()}
        mine = {name: counts for name, counts in latest.items() if counts is not None}
        if groups is None:
            return mine
        mine = {name: counts.cpu() for name, counts in mine.items()}
        if groups.size("pipeline") == 1:
            return mine
        every: list[dict[str, Tensor]] = [{}] * groups.size("pipeline")
        dist.all_gather_object(every, mine, group=groups["pipeline"])
        return {name: counts for stage in every for name, counts in stage.items()}


_MEANS, _SUMS, _HIGHEST = ("aux", "z"), ("dropped",), ("imbalance",)
"""The metrics of routers by how the values of several ranks become one."""


class LossFactor:
    """The factor of the main loss, passed to the routers of a model in each backward pass.

    Only the last stage of a pipeline computes the main loss. Therefore a scalar travels with the activations between
    stages: its gradient is the factor, and arrives at each stage before the gradients of its routers are computed.

    Args:
        model: This rank's part of a model.
        travels: Whether the scalar travels, because a stage of the pipeline has losses of routers.
        device: The device of this rank.
    """

    def __init__(self, model: nn.Module, *, travels: bool, device: torch.device) -> None:
        self.losses, self.travels, self._device = RouterLosses(model), travels, device
        self.is_needed = travels or adds_losses(model)
        self._last: Tensor | None = None  # the scalar at the last stage, for the loss that follows

    def into(self, arguments: tuple[Any, ...], *, is_first: bool) -> tuple[tuple[Any, ...], Tensor]:
        """Separate the scalar from the arguments of a stage; the first stage makes it."""
        if not is_first:
            return arguments[:-1], arguments[-1]
        return arguments, torch.zeros((), device=self._device, requires_grad=torch.is_grad_enabled())

    def out_of(self, output: Any, number: Tensor, *, is_last: bool) -> Any:
        """Append the scalar to the output of a stage. It is made last, so that backward reaches it first."""
        if is_last:
            self._last = number
            return output
        number = self._read(number)
        return (*output, number) if type(output) is tuple else (output, number)

    def of(self, loss: Tensor) -> Tensor:
        """Return the loss with a backward that passes its gradient to the routers before it reaches any of them."""
        if not self.is_needed or not loss.requires_grad:
            return loss
        number, self._last = self._last, None
        joined: Tensor = _Join.apply(loss, number, self.losses)  # type: ignore[no-untyped-call]
        return joined

    def _read(self, number: Tensor) -> Tensor:
        if not number.requires_grad:
            return number
        read: Tensor = _Join.apply(number, None, self.losses)  # type: ignore[no-untyped-call]
        return read


class _Join(torch.autograd.Function):
    """The identity of a loss. Its gradient is the factor of the routers' losses, and the gradient of the scalar."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, number: Tensor | None, losses: RouterLosses) -> Tensor:
        ctx.losses, ctx.number = losses, None if number is None else (number.dtype, number.device)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.losses.scale = gradient
        if ctx.number is None:
            return gradient, None, None
        dtype, device = ctx.number
        return gradient, gradient.reshape(()).to(device, dtype), None


def adds_losses(model: nn.Module) -> bool:
    """Return whether routers of a model add losses to the main loss.

    Args:
        model: Model, or a part of it such as a pipeline stage.
    """
    return any(isinstance(module, Router) and module.balance.has_loss for module in model.modules())


def _reduced(taken: Mapping[str, Tensor], groups: ProcessGroups, *, copies: int) -> dict[str, Tensor]:
    """Reduce the metrics of a model's routers over all its ranks.

    Args:
        taken: Metrics of this rank.
        groups: Live groups.
        copies: Number of ranks that have counted the same dropped tokens.
    """
    device, ranks_of_stage = groups.device, dist.get_world_size() / groups.size("pipeline")

    def shared(names: Sequence[str], divisor: float) -> list[Tensor]:
        # Behind the values a flag for each: whether any rank has measured it, since each stage has routers of its own.
        values = [taken.get(name) for name in names]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        numbers = [zero if value is None else value.to(device, torch.float64) / divisor for value in values]
        return [*numbers, *(zero if value is None else zero + 1 for value in values)]

    sums = torch.stack([*shared(_MEANS, ranks_of_stage), *shared(_SUMS, copies)])
    dist.all_reduce(sums)
    highest = torch.stack(shared(_HIGHEST, 1))
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    means, has_means, dropped, has_dropped = sums.split([len(_MEANS), len(_MEANS), len(_SUMS), len(_SUMS)])
    rows = [
        *zip(_MEANS, means, has_means, strict=True),
        *zip(_HIGHEST, highest[:1], highest[1:], strict=True),
        *zip(_SUMS, dropped, has_dropped, strict=True),
    ]
    return {name: value for name, value, present in rows if present}


@torch.no_grad()
def update_correction_bias_(model: nn.Module, groups: ProcessGroups | dist.ProcessGroup | None = None) -> None:
    """Update the correction biases of all routers in place, and reset the token counts.

    The bias of an expert grows by `LoadBalancing.bias_update_rate` if the expert got fewer tokens than the mean of its
    layer, and shrinks by it if the expert got more. Counts are reset also for routers without a bias.

    Call it once a step, after the last backward and before `optimizer.step()`; `Strategy` does so. It is a collective
    over the ranks that hold the same routers: one all-reduce of the counts, and a second one if the tensor group splits
    tokens.

    Args:
        model: Model, or this rank's part of it.
        groups: Live groups of the layers. For routers made without a grid, the process group of the ranks with
            different tokens; None for one device.
    """
    by_axes: dict[tuple[tuple[str, ...], ...], list[Router]] = {}
    for router in _routers(model).values():
        axes: tuple[tuple[str, ...], ...] = ()
        if isinstance(groups, ProcessGroups):
            tokens = router.load.axes
            every = ((*tokens.replicas, *tokens.context), tokens.partial)
            larger = (tuple(axis for axis in some if groups.size(axis) > 1) for some in every)
            # Routers with the same axes are summed together; the key of the table is these axes.
            axes = tuple(some for some in larger if some)
        by_axes.setdefault(axes, []).append(router)
    for axes, routers in by_axes.items():
        # The counts of all layers travel in one all-reduce: they are small, so its latency is what costs.
        flat = torch.cat([_counts(router) for router in routers])
        if isinstance(groups, ProcessGroups):
            for some in axes:
                dist.all_reduce(flat, group=groups[some if len(some) > 1 else some[0]])
        elif groups is not None:
            dist.all_reduce(flat, group=groups)
        for router, counts in zip(routers, flat.split([router.num_experts for router in routers]), strict=True):
            bias, rate = router.e_score_correction_bias, router.balance.bias_update_rate
            if bias is not None and rate:
                # Compare integers, not means: an expert with exactly the mean must not move by a rounding error.
                bias.add_(torch.sign(counts.sum() - counts * router.num_experts), alpha=rate)
            router.load.end_step(counts)
            router.replay.clear()


def _routers(model: nn.Module) -> dict[str, Router]:
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    for name, router in routers.items():
        router.name = router.name or name
    return routers


def _counts(router: Router) -> Tensor:
    counts = router.load.counts
    return router.weight.new_zeros(router.num_experts, dtype=torch.int64) if counts is None else counts
