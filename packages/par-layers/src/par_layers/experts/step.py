"""Operations on all routers of a model: the scale of their losses, and the update of correction biases per step."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

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

    def take(self) -> dict[str, Tensor]:
        """Return the losses and the load since the last call, without synchronizing with the device.

        Returns:
            "aux" and "z": losses that all routers added, coefficient included, mean over this rank's microbatches.
            "imbalance": tokens of the busiest expert over the mean of its layer, maximum over layers; tokens of all
            ranks if `update_correction_bias_` has ended a step, else of this rank. "dropped": routed tokens of this
            rank that a capacity dropped. Entries that were not measured are missing.
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
        return taken

    def load(self) -> dict[str, Tensor]:
        """Return the tokens of each expert in the last step, summed over all ranks, by name of the router.

        Returns:
            int64 [E] per router. Routers for which `update_correction_bias_` has not yet ended a step are missing.
        """
        latest = {name: router.load.latest for name, router in self._routers.items()}
        return {name: counts for name, counts in latest.items() if counts is not None}


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
