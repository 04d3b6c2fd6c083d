"""The pipeline of the main job: its schedule, and the model's parts as stages."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import ProcessGroups
from par_pipeline import Costs, Schedule, Shared, Timeline, partition, simulate

from ._files import RunFiles
from ._gpt import GPT
from ._options import ModelOptions


def cut_blocks(model: ModelOptions, schedule: Schedule, rank: int) -> list[range]:
    """The runs of blocks that a pipeline rank has, one for each of its stages, ascending."""
    runs = partition(model.layers, schedule.stages)
    return [runs[stage] for stage in schedule.stage_of(rank)]


class Stage(nn.Module):
    """One part of a model, which goes through the whole one's forward, for hooks are there.

    Args:
        model: What this rank has; not a child, so that its other parts are not this one's.
        part: The run of blocks.
    """

    def __init__(self, model: GPT, part: range) -> None:
        super().__init__()
        self.own = nn.ModuleList(model.modules_of(part))
        self.part = part
        self.__dict__["model"] = model
        self.no_sync = model.__dict__["no_sync"]  # of the data-parallel engine: one for all parts

    def forward(self, given: Tensor) -> Tensor:
        """Bytes or hidden states to hidden states or logits."""
        output: Tensor = self.__dict__["model"](given, self.part)
        return output


def tie(model: GPT, groups: ProcessGroups, optimizer: Optimizer) -> Sequence[Shared]:
    """Keeps the table alike that the first and the last stage use, if there is one. Before anything is sharded."""
    if not model.options.tied or groups.size("pipeline") == 1:
        return ()
    table = {"tokens.weight": model.tokens.weight} if hasattr(model, "tokens") else {}
    return (Shared(table, groups["pipeline"], replicas=groups["data"], optimizer=optimizer),)


def draw_step(schedule: Schedule, timeline: Timeline, files: RunFiles, name: str) -> None:
    """Draws a measured step, and the one that the schedule promises with its costs."""
    timeline.draw(files.measured, f"{name}, measured, in seconds")
    simulate(schedule, Costs.measured(timeline)).draw(files.predicted, f"{name}, predicted, in seconds")


def total_over(groups: ProcessGroups, total: Tensor) -> Tensor:
    """The sum over the replicas, and from the last stage to all others. In place."""
    dist.all_reduce(total, group=groups["data"])  # sum over the data group
    if groups.size("pipeline") > 1:
        dist.all_reduce(total, group=groups["pipeline"])  # all but the last stage bring zeros
    return total
