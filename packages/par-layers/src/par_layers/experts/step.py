"""What is done with all routers of a model: once a step for the bias of the choice, and around each loss."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups

from .balance import LossScale
from .router import Router


class RouterLosses:
    """The losses of all routers of a model: what they are multiplied by, and what they were.

    They belong to the model, so two models of a process know nothing of each other.

    Args:
        model: A model with routers, or a part of it, such as a pipeline stage; without routers there is nothing to do.

    Example:
        losses = RouterLosses(model)
        losses.scale = 0.5  # since the main loss is halved, too
        (criterion(model(x), y) * 0.5).backward()
        losses.take()  # {"aux": ..., "imbalance": ...}
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = _routers(model)
        tallies = [router.tally for router in self._routers.values()]
        self._scale = tallies[0].scale if tallies else LossScale()
        for tally in tallies:
            tally.scale = self._scale

    @property
    def scale(self) -> Tensor:
        """What the main loss is multiplied by before backward, one element; 1 at first.

        Backward reads it. Whoever multiplies the main loss, by a loss scale, a weight, or one by the number of
        microbatches, sets it.
        """
        if self._scale.value is None:
            like = next((router.weight for router in self._routers.values()), torch.empty(()))
            dtype = torch.promote_types(like.dtype, torch.float32)  # that in which routers compute
            self._scale.value = torch.ones((), dtype=dtype, device=like.device)
        return self._scale.value

    @scale.setter
    def scale(self, value: Tensor | float) -> None:
        given = value.detach() if isinstance(value, Tensor) else torch.full_like(self.scale, value)
        if given.numel() != 1:
            raise ValueError(f"scale has {given.numel()} elements; give one number")
        self._scale.value = given.reshape(())

    def take(self) -> dict[str, Tensor]:
        """What there was since the last `take`, without waiting for a device; what nobody counted is missing.

        Returns:
            "aux" and "z": what all routers together added to the loss, with its coefficient, the mean over microbatches
            of this rank. "imbalance": tokens of the busiest expert by the mean of its layer's experts, the highest of
            all layers; of all ranks if `update_correction_bias_` has ended a step, else of this rank only. "dropped":
            rows of this rank beyond an expert's capacity.
        """
        tallies = [router.tally for router in self._routers.values()]
        taken: dict[str, Tensor] = {}
        for name in ("aux", "z"):
            means = [tally.losses[name] / tally.microbatches for tally in tallies if name in tally.losses]
            if means:
                taken[name] = torch.stack(means).sum()
        loads = [load for tally in tallies if (load := tally.counts if tally.load is None else tally.load) is not None]
        if loads:
            highest = [load.max() * len(load) / load.sum().clamp(min=1) for load in loads]
            taken["imbalance"] = torch.stack(highest).max()
        dropped = [tally.dropped for tally in tallies if tally.dropped is not None]
        if dropped:
            taken["dropped"] = torch.stack(dropped).sum()
        for tally in tallies:
            tally.load, tally.losses, tally.microbatches, tally.dropped = None, {}, 0, None
        return taken

    def load(self) -> dict[str, Tensor]:
        """Tokens of all ranks for each expert in the step that `update_correction_bias_` ended last, by router.

        Returns:
            Names of routers, and int64 [E] for each; those that no step has ended for are missing.
        """
        latest = {name: router.tally.latest for name, router in self._routers.items()}
        return {name: counts for name, counts in latest.items() if counts is not None}


@torch.no_grad()
def update_correction_bias_(model: nn.Module, groups: ProcessGroups | dist.ProcessGroup | None = None) -> None:
    """Ends a step for all routers of a model, in place: experts with many tokens are chosen less, idle ones more.

    Each bias of the choice gets `Balance.bias_rate` more where an expert had fewer tokens than the mean of its layer,
    and less where it had more. Counts begin anew, also where there is no bias.

    Call it once a step, after the last backward and before `optimizer.step()`; a Strategy does. Collective over the
    ranks with the same routers: one all-reduce, and another one where tokens are cut within the tensor group.

    Args:
        model: The model, or this rank's part of it.
        groups: The groups that its layers were made with; or a process group of those who see other tokens, for routers
            that were made without; None for one device.
    """
    by_axes: dict[tuple[tuple[str, ...], ...], list[Router]] = {}
    for router in _routers(model).values():
        axes: tuple[tuple[str, ...], ...] = ()
        if isinstance(groups, ProcessGroups):
            tokens = router.tally.tokens
            every = ((*tokens.replicas, *tokens.context), tokens.partial)
            larger = (tuple(axis for axis in some if groups.size(axis) > 1) for some in every)
            axes = tuple(some for some in larger if some)
        by_axes.setdefault(axes, []).append(router)
    for axes, routers in by_axes.items():
        flat = torch.cat([_counts(router) for router in routers])
        if isinstance(groups, ProcessGroups):
            for some in axes:
                dist.all_reduce(flat, group=groups[some if len(some) > 1 else some[0]])
        elif groups is not None:
            dist.all_reduce(flat, group=groups)
        for router, counts in zip(routers, flat.split([router.experts for router in routers]), strict=True):
            bias, rate = router.e_score_correction_bias, router.balance.bias_rate
            if bias is not None and rate:
                bias.add_(torch.sign(counts.sum() - counts * router.experts), alpha=rate)  # integers: ties are exact
            router.tally.end_step(counts)
            router.replay.clear()


def _routers(model: nn.Module) -> dict[str, Router]:
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    for name, router in routers.items():
        router.name = router.name or name
    return routers


def _counts(router: Router) -> Tensor:
    counts = router.tally.counts
    return router.weight.new_zeros(router.experts, dtype=torch.int64) if counts is None else counts
