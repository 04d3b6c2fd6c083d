"""What is decided before there is a model: options, this rank's place, groups, the schedule of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import Axes, Channels, Environment, ProcessGroups, Topology
from par_layers import Context, LayerSet, layer_set
from par_pipeline import Schedule, schedule
from par_plan import NUMBER_WIDTHS, BudgetPlan, ModelSizes, model_sizes
from par_zero import ShardOptions, Share

from .axes import EXPERTS, averaged_over, cuts_sequence, data_axes
from .mixture.share import share_of_experts
from .options import StrategyOptions
from .plugin import Plugin
from .schedules import make_schedule, microbatches_of


def check_axes(topology: Topology, groups: ProcessGroups | None) -> None:
    """Checks that there are the groups that a strategy needs.

    Args:
        topology: The axes.
        groups: Live groups that were given; None: they are made as the topology says.

    Raises:
        ValueError: Gradients are averaged over axes over which there is no group, or an axis "expert" says nothing of
            who has which experts.
    """
    apart = data_axes(topology)
    if apart != "data" and EXPERTS not in topology.views:
        raise ValueError(
            f"the topology has expert={topology.size('expert')} and no view {EXPERTS!r}, which says who has which "
            "experts; make it with Topology.from_config"
        )
    if groups is not None:
        groups[averaged_over(topology)]
        if EXPERTS in topology.views:
            groups["data", "expert_data"]


class Setup:
    """What plugins may ask a strategy, which is one: its attributes are documented there."""

    options: StrategyOptions
    environment: Environment
    groups: ProcessGroups
    device: torch.device
    schedule: Schedule | None
    plugins: list[Plugin]
    _owns_groups: bool
    _private_groups: dict[Axes, int]
    plans: Mapping[nn.Module, Any]
    spent: BudgetPlan | None

    @cached_property
    def layers(self) -> LayerSet:
        """The layers of the tensor mode; those of one device, where there is none."""
        return layer_set("auto", self.groups)

    @property
    def context(self) -> Context:
        """What cuts batches over the ranks of the axis `sequence`, and attends over them: that of `layers`.

        Without such an axis it cuts nothing, so that a loop can be written once.
        """
        return self.layers.context

    @property
    def data_axes(self) -> Axes:
        """The axes whose ranks see other samples: "data", and "expert" where experts have ranks of their own."""
        return data_axes(self.groups.topology)

    @property
    def averaged_over(self) -> Axes:
        """The axes over which gradients are averaged: those of the data, and "sequence" where a sequence is cut."""
        return averaged_over(self.groups.topology)

    @property
    def cuts_sequence(self) -> bool:
        """Whether each sequence is cut over several ranks."""
        return cuts_sequence(self.groups.topology)

    @property
    def deals_experts(self) -> bool:
        """Whether experts are dealt out over ranks, which the topology's view "experts" tells."""
        return EXPERTS in self.groups.topology.views

    def private_group(self, axes: Axes) -> dist.ProcessGroup | None:
        """Another communicator over `axes`, which nothing else uses and which ends with the strategy. Collective.

        Returns:
            None where the groups are not this strategy's own, and so end with another one.
        """
        if not self._owns_groups:
            return None
        if self.groups.size(axes) == 1:
            return self.groups[axes]
        count = self._private_groups[axes] = self._private_groups.get(axes, 0) + 1
        self.groups.add(Channels(axes, count))
        return self.groups.channels(axes, count)[-1]

    def inflight_of(self, others: Sequence[Share]) -> int | None:
        """How many chunks may be reduced at a time: what `zero` says, or what a budget counts; None: any number.

        At stages 0 to 2 no rank waits in backward where it also exchanges, so that a budget counts all chunks there.

        Args:
            others: Who shares experts in the place of all data ranks.
        """
        given: int | None = self.options.zero_keywords.get("inflight")
        bounds = self.options.memory is not None and (self.options.stage == 3 or not others)
        return 2 if given is None and bounds else given

    def sizes_of(self, model: nn.Module, optimizer: Optimizer | None) -> ModelSizes:
        """The sizes of what this rank has of a model, as its data ranks will share it.

        Args:
            model: The model, whose parameters have been made.
            optimizer: Its optimizer; None: it is only run.
        """
        given, ranks = self.options.zero_keywords, self.groups.size(self.averaged_over)
        options = ShardOptions(**{name: given[name] for name in ShardOptions.__dataclass_fields__ if name in given})
        parameters, numbers = list(model.parameters()), NUMBER_WIDTHS[self.options.precision]
        if parameters:  # what will be cast before it is packed has more elements in as many bytes
            trained = optimizer is not None and all(each.requires_grad for each in parameters)
            more = parameters[0].element_size() // (numbers.master if trained else numbers.weight)
            options = replace(options, bucket=options.bucket_of(ranks) * max(1, more))
        shares = share_of_experts(model, self.groups)
        options = replace(options, inflight=self.inflight_of(shares))
        experts = [(share.parameters or (), dist.get_world_size(share.group)) for share in shares]
        return model_sizes(
            model,
            optimizer,
            stage=self.options.stage,
            ranks=ranks,
            options=options,
            experts=experts[0] if experts else ((), 1),
        )

    @property
    def sequence_ranks(self) -> int:
        """Over how many tensor ranks activations between two layers of an existing model are cut."""
        return self.groups.size("tensor") if self.layers.rules.residual.sequence else 1

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.is_master

    def make_schedule(self) -> Schedule:
        """The schedule of a pipeline; without one, that of a single rank that takes one microbatch after the other."""
        ranks, options = self.groups.size("pipeline"), self.options.pipeline
        microbatches = microbatches_of(options.get("microbatches", 0), ranks)
        if ranks == 1:
            return schedule("1f1b", 1, microbatches)
        return make_schedule(options.get("schedule", "1f1b"), ranks, microbatches, zero=self.options.stage)
