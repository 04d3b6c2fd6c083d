"""Stages that run a model's own code: copies of the model that share its modules, but not those of other stages.

In a stage, `Absent` modules replace the layers of other stages. The stage runs the model's own forward, including all
code around the layers, and parameters keep their names. Hooks (`_Borders`) let hidden states enter and leave between
two layers, because a model may scale its embeddings before the first layer and its logits after the last.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import children_of

StagePlan = dict[str, tuple[list[str], list[str]]]
"""The arguments and results of the modules around the layers, and of the list of layers, by name."""

EMBEDS = "inputs_embeds"

TOWER = ["pixel_values"]
"""The arguments of a module that computes features of images, which the model's code puts into its embeddings."""

_OF_IMAGES = ("pixel_values", "image_", "video_")
"""Beginnings of the keywords that only the encoder of images reads, and the stage that has it."""


def split(model: nn.Module, plan: StagePlan, layers: str, runs: Sequence[range]) -> list[nn.Module]:
    """Make stages that share their modules with the model, which stays unchanged.

    Args:
        model: Model with all its layers.
        plan: The modules that run before and after the layers, and the layers.
        layers: Name of the list of layers.
        runs: Positions of the layers of each stage.
    """
    every = list(model.get_submodule(layers).children())
    values = len(plan[layers][1])
    stages: list[nn.Module] = []
    for run in runs:
        stage, is_first, is_last = twin(model, plan), run.start == 0, run.stop == len(every)
        for name, (takes, gives) in plan.items():
            if name == layers:
                continue
            if gives == [EMBEDS] or takes == TOWER:
                if not is_first:
                    _replace(stage, name, AbsentEmbedding() if gives == [EMBEDS] else Absent())
            elif not is_last:
                _replace(stage, name, Absent())
        # The code of the model loops over all layers, so absent layers stay in the list as identities.
        absent = {position: Absent(each, values) for position, each in enumerate(every) if position not in run}
        for position, layer in absent.items():
            _replace(stage, f"{layers}.{position}", layer)
        reads_images = any(takes == TOWER for takes, _ in plan.values())
        behind = [layer for position, layer in absent.items() if reads_images and position > run.stop]
        _Borders(stage, before=absent.get(run.start - 1), after=absent.get(run.stop), behind=behind)
        stages.append(stage)
    return stages


class Absent(nn.Module):
    """Identity in place of a layer of another stage.

    Args:
        layer: The layer, whose numbers and texts the model's code may read. Default: none.
        values: Number of values that the layer returns: hidden states, or a tuple that begins with them.
    """

    def __init__(self, layer: nn.Module | None = None, values: int = 1) -> None:
        super().__init__()
        # A model may read the kind of a layer, to choose its mask: an attribute of the layer, or of its class.
        tables = [] if layer is None else [vars(layer), *(vars(kind) for kind in type(layer).__mro__)]
        for name, each in ((name, each) for table in tables for name, each in table.items()):
            if isinstance(each, str | int | float) and not hasattr(self, name):
                self.__dict__[name] = each
        self.__dict__["_values"] = values

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        """Return hidden states [rows, time, width] unchanged."""
        return self.returned(hidden_states)

    def returned(self, hidden_states: Any, other: object = None) -> Any:
        """Return hidden states in the form in which the layer does.

        Args:
            hidden_states: The hidden states.
            other: The other values in the layer's tuple, which the model does not use.
        """
        values = self.__dict__["_values"]
        return hidden_states if values == 1 else (hidden_states, *[other] * (values - 1))


class AbsentEmbedding(nn.Module):
    """Stands for a module before the layers, in a stage that receives hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Any:
        """Return the embeddings that the module receives; otherwise a zero, which changes no sum."""
        return torch.zeros(()) if inputs_embeds is None else inputs_embeds


class _Borders:
    """Hooks at the start and end of a stage's layers, and the hidden states that they hold during a forward.

    Args:
        stage: Model with this stage's layers. It is called with one positional tensor.
        before: Identity in place of the layer before this stage's layers; None for the first stage.
        after: Identity in place of the layer after this stage's layers; None for the last stage.
        behind: Identities in place of all later layers.
    """

    def __init__(self, stage: nn.Module, before: Absent | None, after: Absent | None, behind: Sequence[Absent]) -> None:
        self._is_first, self._is_last = before is None, after is None
        self._keywords: dict[str, Any] = {"use_cache": False} if takes(stage, "use_cache") else {}
        self._kind = type(stage).__name__
        self._places_images = any(hasattr(type(module), "get_rope_index") for module in stage.modules())
        self._entered: Tensor | None = None
        self._left: Tensor | None = None
        # Other hooks expect the keyword arguments of the model, so this hook runs first.
        stage.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if before is not None:
            before.register_forward_hook(self._go_on)
        if after is not None:
            after.register_forward_hook(self._note)
        # A stage notes hidden states once, so a later change to them would be lost.
        for layer in behind:
            layer.register_forward_pre_hook(self._check_unchanged)
        # It also runs if the forward raises, so that no hidden states stay in memory.
        stage.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: nn.Module, args: tuple[Tensor], keywords: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Return the stage's input as keyword arguments of the model's forward."""
        (self._entered,) = args
        if self._is_first:
            return (), {"input_ids": self._entered, **self._keywords, **keywords}
        # A later stage skips the embedding: models accept hidden states in its place. If a model has several streams of
        # hidden states, [rows, time, streams, width], its embeddings have one. The values are not used.
        embeds = self._entered
        # The encoder of images is in the first stage, and its features are in the hidden states already.
        given = [name for name, value in keywords.items() if name.startswith(_OF_IMAGES) and value is not None]
        if self._places_images and given and keywords.get("position_ids") is None:
            raise ValueError(
                f"{given[0]} without position_ids: a stage that receives hidden states cannot compute the positions of "
                "images; pass the position_ids that get_rope_index of the model returns"
            )
        keywords = {name: value for name, value in keywords.items() if not name.startswith(_OF_IMAGES)}
        if embeds.dim() > 3:
            embeds = embeds.new_zeros(()).expand(*embeds.shape[:2], embeds.shape[-1])
        return (), {EMBEDS: embeds, **self._keywords, **keywords}

    def _go_on(self, absent: Absent, *_: Any) -> Any:
        """Return the hidden states from the stage before, in place of the model's own changes to them."""
        return absent.returned(self._entered)

    def _note(self, _: nn.Module, __: Any, output: Any) -> None:
        """Store the hidden states for the next stage."""
        self._left = output[0] if isinstance(output, tuple) else output

    def _check_unchanged(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Raise if the model changed hidden states between layers of later stages, which would not see the change."""
        if args and args[0] is not self._left:
            raise TypeError(
                f"{self._kind} changes hidden states between two layers of a later stage, as the features of images in "
                "deepstack do; pass a schedule of fewer stages, so that the first has these layers"
            )

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Tensor | None:
        """Return the logits, or the hidden states for the next stage."""
        # The model applies its final norm to the output, so the hidden states are those noted behind the last own
        # layer.
        left, self._entered, self._left = self._left, None, None
        if output is None:  # the forward has raised
            return None
        logits: Tensor = output[0]
        return logits if self._is_last else left


def takes(model: nn.Module, argument: str) -> bool:
    """Return whether a model's forward has an argument of a name."""
    parameters = inspect.signature(model.forward).parameters
    return argument in parameters or any(each.kind == each.VAR_KEYWORD for each in parameters.values())


def twin(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Copy a model such that named modules can be replaced: their parents are copied, all other modules are shared."""
    copied = shallow(model)
    made = {"": copied}
    for name in names:
        path = ""
        for part in name.split("."):
            above, path = made[path], f"{path}.{part}".lstrip(".")
            child = above.get_submodule(part)
            # Only modules whose children are replaced are copied. All other modules must stay shared with the model.
            if path not in made and (path != name or isinstance(child, nn.ModuleList)):
                made[path] = children_of(above)[part] = shallow(child)
    return copied


def shallow(module: nn.Module) -> nn.Module:
    """Copy a module: it shares children and parameters, but has its own tables of them and of its hooks."""
    copied = copy.copy(module)
    copied.__dict__.update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return copied


def _replace(model: nn.Module, name: str, instead: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, instead)
