"""The stages of one rank as one module: parameters with their names in the full model, and those of several ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import attributes

from .._torch_private import buffers_of, children_of, parameters_of, unsaved_buffers_of
from ..schedules.schedule import Schedule
from ..stages.build import build_stage
from ..stages.lazy import Lazy
from .shared import Shared

Layers = nn.Sequential | Sequence[nn.Module | Lazy | Mapping[str, Any]]
"""The layers of a model in order: modules, or descriptions of modules."""


class PipelineStages(nn.Module):
    """The pipeline stages of one rank as one module, whose parameters have their names in the full model.

    A data-parallel wrapper, an optimizer and a checkpoint then see one module on each rank, however many stages it has.

    Args:
        parts: The module that runs each stage, by the number of the stage.
        children: The modules that the parts consist of, by their names in the full model.
        tied: Sets of parameters that stages of other ranks use as well. A set is a mapping from name to parameter. All
            ranks pass the same number of sets in the same order. A rank that uses no parameter of a set passes an
            empty mapping.
        pretrained: The transformers model that was split, with its config. Default: none.

    Attributes:
        shared: The objects that keep the tied parameters identical, once `tie_` has run.
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
        # Parts are no children: their names would be a prefix of all parameter names.
        self.__dict__["parts"] = dict(parts)
        attributes.PRETRAINED.set(self, pretrained)  # par-checkpoint writes the config of this model
        self.tied = tuple(tied)
        self.shared: tuple[Shared, ...] = ()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the parts as well, which are no children."""
        for part in self.__dict__["parts"].values():
            part.train(mode)
        return super().train(mode)

    def forward(self, *inputs: Any, stage: int, **keywords: Any) -> Any:
        """Run one stage."""
        return self.__dict__["parts"][stage](*inputs, **keywords)

    def tie_(
        self,
        group: dist.ProcessGroup,
        *,
        replicas: dist.ProcessGroup | None = None,
        optimizer: Optimizer | None = None,
        prefix: str = "",
    ) -> None:
        """Make tied parameters identical on all ranks, before anything is sharded. Collective over the pipeline.

        Their sharding metadata then lists these ranks as replicas of each other.

        Args:
            group: The ranks of the pipeline.
            replicas: The ranks that run the same stages on other data, if there are any.
            optimizer: The optimizer of the parameters, if it holds their gradients; see `Shared`.
            prefix: The prefix of their names, if the optimizer has several models.
        """
        named = [{prefix + name: parameter for name, parameter in each.items()} for each in self.tied]
        self.shared = tuple(Shared(each, group, replicas=replicas, optimizer=optimizer) for each in named)

    def runners(self, make: "Callable[[PipelineStages, int], StageRunner] | None" = None) -> "list[StageRunner]":
        """Return the modules to pass to `Pipeline`, one for each stage of this rank.

        Args:
            make: A function of these stages and the number of one. Default: `StageRunner`.
        """
        return [(make or StageRunner)(self, number) for number in self.__dict__["parts"]]


class StageRunner(nn.Module):
    """One stage, run through the forward of the rank's `PipelineStages`: hooks, such as those of ZeRO, are there.

    Args:
        stages: The stages of the rank; not a child, so that the other stages are not part of this module.
        number: The number of the stage.
    """

    def __init__(self, stages: PipelineStages, number: int) -> None:
        super().__init__()
        self.own = stages.__dict__["parts"][number]
        self.number = number
        self.__dict__["stages"] = stages
        trained = any(parameter.requires_grad for parameter in self.own.parameters())
        # The pipeline leaves no_sync for the last backward of a stage, in which ZeRO reduces. A stage without trained
        # parameters has no such backward, so it must not have the attribute. One no_sync serves all stages of a rank.
        if "no_sync" in stages.__dict__ and trained:
            self.no_sync = stages.__dict__["no_sync"]

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the stage."""
        return self.__dict__["stages"](*inputs, stage=self.number, **keywords)


def build_stages(layers: Layers, schedule: Schedule, rank: int, *, seed: int | None = None) -> PipelineStages:
    """Build the stages that a schedule assigns to a rank out of a list of layers.

    Parameters that several layers of an nn.Sequential use, in stages of different ranks, are tied.

    Args:
        layers: All layers of the model. A layer that is only described is built on the rank that runs it.
        schedule: The schedule, which defines the number of stages and their ranks.
        rank: The rank in the pipeline group.
        seed: The seed of the weights of layers that are built here.
    """
    made = build_stage(layers, schedule, rank, seed=seed)
    children = {name: child for part in made for name, child in children_of(part).items() if child is not None}
    parts = dict(zip(schedule.stage_of(rank), made, strict=True))
    sequential = children_of(layers) if isinstance(layers, nn.Sequential) else {}
    # Not layers.named_parameters(): a layer that occurs twice in the sequence has both names here.
    named = (pair for child, layer in sequential.items() if layer is not None for pair in layer.named_parameters(child))
    tied = [
        {names[0]: parameter} if any(name.partition(".")[0] in children for name in names) else {}
        for parameter, names in _used_several_times(named)
    ]
    return PipelineStages(parts, _with_foreign(tied, children), tied)


def build_model_stages(model: nn.Module, schedule: Schedule, rank: int, sequence_ranks: int = 1) -> PipelineStages:
    """Build the stages that a schedule assigns to a rank out of a transformers model, whose modules they share.

    Parameters keep their names in the model. A tied output embedding is tied over the ranks.

    Args:
        model: The model, perhaps on the meta device. Without a complete `_pp_plan`, its layers are found by a trial.
        schedule: The schedule, which defines the number of stages and their ranks.
        rank: The rank in the pipeline group.
        sequence_ranks: The number of tensor ranks over which activations between two layers are split.

    Raises:
        TypeError: The model has no plan for stages.
        ValueError: The model adds a loss of the routers of all layers, and a stage has only its own layers.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # models with images have several
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"config.output_router_logits=True: {type(model).__name__} adds a loss of the routers of all layers, and "
            "a pipeline stage has only its own layers; set config.output_router_logits = False, or train the model "
            "without a pipeline"
        )
    made = build_stage(model, schedule, rank)
    own = {id(parameter) for part in made for parameter in part.parameters()}
    often = _used_several_times(model.named_parameters(remove_duplicate=False))
    # A stage that uses a tied parameter under its second name only, such as the output embedding, registers it under
    # the first one too: the optimizer, checkpoints and all ranks then agree on one name.
    for part in made:
        for parameter, (first, *_) in often:
            if any(parameter is each for each in part.parameters()):
                path, _, last = first.rpartition(".")
                holder = _made_submodule(part, path)
                # The output embedding's stage may also contain the embedding itself.
                if last not in parameters_of(holder):
                    holder.register_parameter(last, parameter)
    parts = dict(zip(schedule.stage_of(rank), made, strict=True))
    for number, part in parts.items():
        if sequence_ranks > 1 and number > 0:
            part.register_forward_pre_hook(_FullLength(sequence_ranks), with_kwargs=True)
    tied = [{used[0]: parameter} if id(parameter) in own else {} for parameter, used in often]
    children = {name: child for name, child in children_of(_merged(made)).items() if child is not None}
    return PipelineStages(parts, children, tied, pretrained=made[-1])


class _FullLength:
    """A forward pre-hook that passes embeddings of the full sequence length to a later stage.

    A transformers model derives positions and masks from the length of its embeddings, and this rank has a shard of the
    sequence. The values are not read: the stage continues from the output of the stage before.

    Args:
        ranks: The number of ranks over which the sequence is split.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(
        self, stage: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part: Tensor = keywords["inputs_embeds"]
        # In evaluation without gradients par-layers gathers the sequence between layers, so that it is full already.
        if stage.training or torch.is_grad_enabled():
            rows, time, width = part.shape
            keywords = {**keywords, "inputs_embeds": part.new_zeros(()).expand(rows, time * self.ranks, width)}
        return args, keywords


def _merged(parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module with the children of several stages of one model, each of which lacks other layers."""
    # A part without any tensor has nothing to contribute to names, and its class may differ.
    holding = [part for part in parts if any(True for _ in part.parameters()) or any(True for _ in part.buffers())]
    holding = holding or list(parts[:1])
    if all(part is holding[0] for part in holding):
        return holding[0]
    merged = nn.Module()
    for part in holding:
        parameters_of(merged).update(parameters_of(part))
        for name in children_of(part):
            if name not in children_of(merged):
                same = [child for each in holding if (child := children_of(each).get(name)) is not None]
                merged.add_module(name, _merged(same) if same else None)
        for name, buffer in buffers_of(part).items():
            merged.register_buffer(name, buffer, persistent=name not in unsaved_buffers_of(part))
    return merged


def _used_several_times(named: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[nn.Parameter, list[str]]]:
    """List the parameters with several names, and all names of each. Every rank sees the full model: all agree."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named:
        names.setdefault(parameter, []).append(name)
    # The order is that of the full model, which is equal on all ranks, so that the sets match by position.
    return [(parameter, used) for parameter, used in names.items() if len(used) > 1]


def _made_submodule(module: nn.Module, path: str) -> nn.Module:
    """Return a submodule. Empty modules take the place of those on its path that another stage has."""
    for name in path.split(".") if path else ():
        if name not in children_of(module):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def _with_foreign(
    tied: Sequence[Mapping[str, nn.Parameter]], children: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Add empty modules of other ranks to the children, for tied parameters whose first name is in these modules.

    A tied parameter then has one name on all ranks. These modules come first, so that this name is found first.
    """
    foreign: dict[str, nn.Module] = {}
    for name, parameter in (pair for each in tied for pair in each.items()):
        child, *path, last = name.split(".")
        if child in children:
            continue
        holder = _made_submodule(foreign.setdefault(child, nn.Module()), ".".join(path))
        holder.register_parameter(last, parameter)
    return {**foreign, **children}


def remove_foreign_parameters_(optimizer: Optimizer, module: nn.Module) -> None:
    """Remove the parameters of other ranks' stages from an optimizer. Its groups stay, even if they are empty."""
    own = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        kept = [id(each) in own for each in group["params"]]
        for each, keep in zip(group["params"], kept, strict=True):
            if not keep:
                optimizer.state.pop(each, None)  # Adagrad's constructor has made it
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [each for each, keep in zip(group[key], kept, strict=True) if keep]
