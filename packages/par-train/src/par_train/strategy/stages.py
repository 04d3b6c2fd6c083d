"""What one pipeline rank has of a model."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import ProcessGroups, attributes
from par_pipeline import Lazy, Schedule, Shared, build_stage

from .axes import averaged_over
from .mixture.factor import LossFactor

Layers = nn.Sequential | Sequence[nn.Module | Lazy | Mapping[str, Any]]
"""Layers one after the other, there or only described."""


class Stages(nn.Module):
    """The stages of one rank as one module, whose parameters have the names that they have in the whole model.

    Args:
        parts: By number of the stage: a module that runs it.
        children: What the parts are made of, by its name in the whole model.
        tied: Parameters that other ranks' stages use too: a mapping from names to them for each set; all ranks give as
            many, in the same order, and empty ones where they use none.
        pretrained: The model of transformers that the parts are of, with its config; None: they are of none.

    Attributes:
        shared: Once it is tied: what keeps those parameters alike.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        children: Mapping[str, nn.Module],
        tied: Sequence[Mapping[str, nn.Parameter]] = (),
        pretrained: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)
        self.__dict__["parts"] = dict(parts)  # no children: they would be a part of all names
        attributes.PRETRAINED.set(self, pretrained)  # where par-checkpoint looks for the config
        self.tied = tuple(tied)
        self.shared: tuple[Shared, ...] = ()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the parts too, which are no children."""
        for part in self.__dict__["parts"].values():
            part.train(mode)
        return super().train(mode)

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
        group, replicas = groups["pipeline"], groups[averaged_over(groups.topology)]
        named = [{prefix + name: parameter for name, parameter in each.items()} for each in self.tied]
        self.shared = tuple(Shared(each, group, replicas=replicas, optimizer=optimizer) for each in named)

    def runners(self, last: int, factor: LossFactor | None = None) -> list["Stage"]:
        """What a `par_pipeline.Pipeline` is made of.

        Args:
            last: Number of the pipeline's last stage.
            factor: What brings routers the factor of the loss, where it travels between stages.
        """
        travelling = factor if factor is not None and factor.travels else None
        return [Stage(self, number, last, travelling) for number in self.__dict__["parts"]]


class Stage(nn.Module):
    """One stage, which goes through the forward of the rank's whole part, for hooks are there.

    Args:
        whole: The rank's part; not a child, so that its other stages are not this one's.
        number: Number of the stage.
        last: Number of the pipeline's last stage.
        factor: What brings routers the factor of the loss, in a number that travels with the activations; or None.
    """

    def __init__(self, whole: Stages, number: int, last: int, factor: LossFactor | None = None) -> None:
        super().__init__()
        self.own = whole.__dict__["parts"][number]
        self.number, self.last = number, last
        self.__dict__["factor"] = factor
        self.__dict__["whole"] = whole
        trained = any(parameter.requires_grad for parameter in self.own.parameters())
        if "no_sync" in whole.__dict__ and trained:  # else its last backward would bring no gradient to reduce with
            self.no_sync = whole.__dict__["no_sync"]  # of the data-parallel engine: one for all stages

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """As the stage's."""
        whole, factor = self.__dict__["whole"], self.__dict__["factor"]
        if factor is None:
            return whole(*inputs, stage=self.number, **keywords)
        inputs, travelling = factor.into(inputs, is_first=self.number == 0)
        output = whole(*inputs, stage=self.number, **keywords)
        return factor.out_of(output, travelling, is_last=self.number == self.last)


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
    named = (  # one layer may come again
        pair
        for child, layer in (layers._modules.items() if isinstance(layers, nn.Sequential) else ())
        for pair in layer.named_parameters(prefix=child)
    )
    tied = [
        {names[0]: parameter} if any(name.partition(".")[0] in children for name in names) else {}
        for parameter, names in _used_often(named)
    ]
    return Stages(parts, _named_first(tied, children), tied)


def build_model_stages(model: nn.Module, schedule: Schedule, rank: int, sequence_ranks: int = 1) -> Stages:
    """The stages that a schedule gives a rank, out of a model of transformers, whose modules they share.

    Parameters keep the names that they have in the model. A tied output embedding is tied over the ranks.

    Args:
        model: The model, which says by its `_pp_plan` where it may be cut; it may be on the meta device.
        schedule: Says how many stages there are, and which this rank has.
        rank: In the pipeline.
        sequence_ranks: Over how many tensor ranks activations between two layers are cut along the sequence.

    Raises:
        TypeError: The model does not say where it may be cut.
        ValueError: It adds up a loss of its routers over all layers, of which a stage sees its own.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # of a model with images, too
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"this {type(model).__name__} adds a loss of its routers, from all layers, and a stage sees its own alone; "
            "set config.output_router_logits = False, or train it without a pipeline"
        )
    made = build_stage(model, schedule, rank)
    own = {id(parameter) for part in made for parameter in part.parameters()}
    often = _used_often(model.named_parameters(remove_duplicate=False))
    for part in made:
        for parameter, (first, *_) in often:
            if any(parameter is each for each in part.parameters()):
                _name_first(part, first, parameter)
    parts = dict(zip(schedule.stage_of(rank), made, strict=True))
    for number, part in parts.items():
        if sequence_ranks > 1 and number > 0:
            part.register_forward_pre_hook(_WholeLength(sequence_ranks), with_kwargs=True)
    tied = [{used[0]: parameter} if id(parameter) in own else {} for parameter, used in often]
    return Stages(parts, dict(_merged(made)._modules), tied, pretrained=made[-1])  # type: ignore[arg-type]


def check_stages(models: Iterable[nn.Module], schedule: Schedule | None, rank: int) -> None:
    """Makes sure that models of transformers can be cut into stages, before anything is changed.

    Args:
        models: Models; those of other kinds are not looked at.
        schedule: Says how many stages there are; None: there is no pipeline.
        rank: In the pipeline.

    Raises:
        TypeError, ValueError: As `build_model_stages`, which shares the modules of a model and leaves it as it is.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if schedule is None or modeling is None:
        return
    for model in models:
        if isinstance(model, modeling.PreTrainedModel):
            build_model_stages(model, schedule, rank)


class _WholeLength:
    """What a later stage says its embeddings are: as long as the whole sequence, though the rank has a part of it.

    A model takes positions and masks from the length of its embeddings. What it computes with goes on from what the
    stage before gave.

    Args:
        ranks: Over how many ranks the sequence is cut where gradients may be asked for.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(
        self, stage: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part: Tensor = keywords["inputs_embeds"]
        if stage.training or torch.is_grad_enabled():
            rows, time, width = part.shape
            keywords = {**keywords, "inputs_embeds": part.new_zeros(()).expand(rows, time * self.ranks, width)}
        return args, keywords


def _merged(parts: Sequence[nn.Module]) -> nn.Module:
    """A module with the children of several, which are alike but for what each of them leaves out."""
    holding = [part for part in parts if any(True for _ in part.parameters()) or any(True for _ in part.buffers())]
    holding = holding or list(parts[:1])
    if all(part is holding[0] for part in holding):
        return holding[0]
    merged = nn.Module()
    for part in holding:
        merged._parameters.update(part._parameters)
        for name in part._modules:
            if name not in merged._modules:
                merged.add_module(name, _merged([each._modules[name] for each in holding if name in each._modules]))  # type: ignore[misc]
        for name, buffer in part._buffers.items():
            merged.register_buffer(name, buffer, persistent=name not in part._non_persistent_buffers_set)
    return merged


def _name_first(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Gives a parameter that a stage uses under another name its first one too, in the place of an absent module."""
    path, _, last = name.rpartition(".")
    holder = part.get_submodule(path)
    if last not in holder._parameters:
        holder.register_parameter(last, parameter)


def _used_often(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that have several names, by all of these; every rank sees the whole model, and finds the same."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named:
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
        for each, keep in zip(group["params"], kept, strict=True):
            if not keep:
                optimizer.state.pop(each, None)  # a constructor's, as Adagrad's
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [each for each, keep in zip(group[key], kept, strict=True) if keep]
