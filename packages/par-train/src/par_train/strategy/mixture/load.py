"""The load of experts, over all ranks of a model."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups
from par_layers import Router, RouterLosses

_MEANS = ("aux", "z")
_SUMS = ("dropped",)
_HIGHEST = ("imbalance",)


def metrics_of(losses: RouterLosses, model: nn.Module, groups: ProcessGroups) -> dict[str, Tensor]:
    """Return the metrics of a model's routers over all its ranks. Collective over the world: two small all-reduces.

    Args:
        losses: The losses of this rank's part of the model.
        model: This rank's part.
        groups: The groups of ranks along each axis.

    Returns:
        By name, fp64 scalars that are the same on all ranks; see `Strategy.router_metrics`.
    """
    taken, device = losses.take(), groups.device
    partial = {axis for module in model.modules() if isinstance(module, Router) for axis in module.load.axes.partial}
    copies = groups.size("tensor") if not partial else 1  # tensor ranks that drop the same rows
    of_stage = dist.get_world_size() / groups.size("pipeline")

    def shared(names: Sequence[str], divisor: float) -> list[Tensor]:
        values = [taken.get(name) for name in names]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        numbers = [zero if value is None else value.to(device, torch.float64) / divisor for value in values]
        return [*numbers, *(zero if value is None else zero + 1 for value in values)]

    sums = torch.stack([*shared(_MEANS, of_stage), *shared(_SUMS, copies)])
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


def loads_of(losses: RouterLosses, groups: ProcessGroups) -> dict[str, Tensor]:
    """Return the tokens of each expert in the latest step, by router, of all stages. Collective over the pipeline."""
    mine = {name: counts.cpu() for name, counts in losses.load().items()}
    if groups.size("pipeline") == 1:
        return mine
    every: list[dict[str, Tensor]] = [{}] * groups.size("pipeline")
    dist.all_gather_object(every, mine, group=groups["pipeline"])
    return {name: counts for stage in every for name, counts in stage.items()}
