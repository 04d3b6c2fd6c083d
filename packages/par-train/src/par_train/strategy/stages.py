"""What one pipeline rank has of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from par_groups import ProcessGroups
from par_pipeline import Lazy, Schedule, Shared, build_stage

Layers = nn.Sequential | Sequence[nn.Module | Lazy | Mapping[str, Any]]
"""Layers one after the other, there or only described."""


class Stages(nn.Module):
    """The stages of one rank as one module, whose parameters have the names that they have in the whole model.

    Args:
        parts: By number of the stage: a module that runs it.
        children: What the parts are made of, by its name in the whole model.
        tied: Parameters that other ranks' stages use too: a mapping from names to them for each set; all ranks give as
            many, in the same order, and empty ones where they use none.

    Attributes:
        shared: Once it is tied: what keeps those parameters alike.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        children: Mapping[str, nn.Module],
        tied: Sequence[Mapping[str, nn.Parameter]] = (),
    ) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.__dict__["parts"] = dict(parts)  # no children: they would be a part of all names
        self.tied = tuple(tied)
        self.shared: tuple[Shared, ...] = ()

    def forward(self, *inputs: Any, stage: int, **keywords: Any) -> Any:
        """Runs one stage."""
        return self.__dict__["parts"][stage](*inputs, **keywords)

    def tie_(self, groups: ProcessGroups, optimizer: Optimizer | None, prefix: str = "") -> None:
        """Makes tied parameters alike, and their records copies of each other. Before anything is sharded. Collective.

        Args:
            groups: The strategy's groups.
            optimizer: The optimizer that holds the parameters.
            prefix: What comes before their names, where the optimizer has several models.
        """
        group, replicas = groups["pipeline"], groups["data"]
        named = [{prefix + name: parameter for name, parameter in each.items()} for each in self.tied]
        self.shared = tuple(Shared(each, group, replicas=replicas, optimizer=optimizer) for each in named)

    def runners(self) -> list["Stage"]:
        """What a `par_pipeline.Pipeline` is made of."""
        return [Stage(self, number) for number in self.__dict__["parts"]]


class Stage(nn.Module):
    """One stage, which goes through the forward of the rank's whole part, for hooks are there.

    Args:
        whole: The rank's part; not a child, so that its other stages are not this one's.
        number: Number of the stage.
    """

    def __init__(self, whole: Stages, number: int) -> None:
        super().__init__()
        self.own = whole.__dict__["parts"][number]
        self.number = number
        self.__dict__["whole"] = whole
        trained = any(parameter.requires_grad for parameter in self.own.parameters())
        if "no_sync" in whole.__dict__ and trained:  # else its last backward would bring no gradient to reduce with
            self.no_sync = whole.__dict__["no_sync"]  # of the data-parallel engine: one for all stages

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """As the stage's."""
        return self.__dict__["whole"](*inputs, stage=self.number, **keywords)


def build_stages(layers: Layers, schedule: Schedule, rank: int, *, seed: int | None = None) -> Stages:
    """The stages that a schedule gives a rank, out of a list of layers.

    Parameters that several layers of an nn.Sequential use, in stages of different ranks, are tied.

    Args:
        layers: All of them; those that are only described are built where they run.
        schedule: Says how many stages there are, and which this rank has.
        rank: In the pipeline.
        seed: Seed of the weights of layers that are built here.
    """
    made = build_stage(layers, schedule, rank, seed=seed)
    children = {name: child for part in made for name, child in part._modules.items() if child is not None}
    parts = dict(zip(schedule.stage_of(rank), made, strict=True))
    tied = [
        {names[0]: parameter} if any(name.partition(".")[0] in children for name in names) else {}
        for parameter, names in _used_often(layers)
    ]
    return Stages(parts, _named_first(tied, children), tied)


def _used_often(layers: Layers) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that several layers use, by all their names; every rank sees all layers, and finds the same."""
    names: dict[nn.Parameter, list[str]] = {}
    for child, layer in layers._modules.items() if isinstance(layers, nn.Sequential) else ():  # one may come again
        for name, parameter in layer.named_parameters(prefix=child):
            names.setdefault(parameter, []).append(name)
    return [(parameter, used) for parameter, used in names.items() if len(used) > 1]


def _named_first(tied: Sequence[Mapping[str, nn.Parameter]], children: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The children, after those of other ranks that a tied parameter has its name from: it is the same everywhere."""
    foreign: dict[str, nn.Module] = {}
    for name, parameter in (pair for each in tied for pair in each.items()):
        child, *path, last = name.split(".")
        if child in children:
            continue
        holder = foreign.setdefault(child, nn.Module())
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(last, parameter)
    return {**foreign, **children}


def leave_foreign_(optimizer: Optimizer, module: nn.Module) -> None:
    """Takes the parameters of other ranks' stages out of an optimizer, whose groups stay, even if they are empty."""
    own = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        kept = [id(each) in own for each in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [each for each, keep in zip(group[key], kept, strict=True) if keep]
