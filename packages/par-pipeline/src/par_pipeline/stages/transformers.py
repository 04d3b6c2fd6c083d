"""Stages of a Hugging Face model, cut where its own `_pp_plan` says. transformers itself is not imported."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn

_EMBEDS = "inputs_embeds"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that may be shared out.

    Raises:
        TypeError: The model says nothing of pipelines.
    """
    _, name = _plan(model)
    return list(cast("nn.ModuleList", model.get_submodule(name)))


def cut(model: nn.Module, runs: Sequence[range]) -> list[nn.Module]:
    """Stages that share their modules with the model, which is left as it is.

    Args:
        model: The whole.
        runs: The layers of each stage.
    """
    plan, name = _plan(model)
    count = len(layers_of(model))
    stages: list[nn.Module] = []
    for run in runs:
        part, first, last = _twin(model, plan), run.start == 0, run.stop == count
        for each, (_, gives) in plan.items():
            if each != name and not (first if gives == [_EMBEDS] else last):
                _replace(part, each, Absent())
        before, after = None if first else Border(), None if last else Border()
        for position in set(range(count)).difference(run):
            absent = {run.start - 1: before, run.stop: after}.get(position)
            _replace(part, f"{name}.{position}", absent or Absent())
        stages.append(ModelStage(part, before, after))
    return stages


class Absent(nn.Module):
    """In the place of a layer that another stage has: gives what it is given."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The same."""
        return hidden_states


class Border(nn.Module):
    """In the place of the layer before or after a stage's own.

    Attributes:
        gives: What another stage gave, to go on with; None: what it is called with.
        took: What it was called with.
    """

    gives: Tensor | None = None
    took: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Hidden states (rows, time, width) to the same."""
        self.took = hidden_states
        return hidden_states if self.gives is None else self.gives


class ModelStage(nn.Module):
    """One stage: the model's own forward, which passes over the layers of the others.

    What comes in and goes out does so between two layers: a model may scale its embeddings before the first one and
    its logits after the last.

    Args:
        part: The model with this stage's layers. It is no child, which would be a part of all names.
        before: In the place of the layer before this stage's; None: this is the first stage.
        after: In the place of the layer after them; None: this is the last stage.
    """

    def __init__(self, part: nn.Module, before: Border | None, after: Border | None) -> None:
        super().__init__()
        for name, child in part.named_children():
            self.add_module(name, child)
        self.__dict__.update(_part=part, _before=before, _after=after)

    def forward(self, given: Tensor, **keywords: Any) -> Tensor:
        """Token ids (rows, time) on the first stage, else hidden states (rows, time, width); likewise out of it."""
        part, before, after = (self.__dict__[each] for each in ("_part", "_before", "_after"))
        takes = "input_ids" if before is None else _EMBEDS
        try:
            if before is not None:
                before.gives = given
            output: Tensor = part(**{takes: given}, use_cache=False, **keywords)[0]
            if after is not None:
                output = after.took
            return output
        finally:
            for each in (before, after):
                if each is not None:
                    each.gives = each.took = None

    def train(self, mode: bool = True) -> "ModelStage":
        """As of any module; the part follows."""
        super().train(mode)
        self.__dict__["_part"].train(mode)
        return self


def _twin(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """The same model in which the named modules can be replaced: what is above them is made anew, all else shared."""
    twin = _shallow(model)
    made = {"": twin}
    for name in names:
        path = ""
        for part in name.split("."):
            above, path = made[path], f"{path}.{part}".lstrip(".")
            child = above.get_submodule(part)
            if path not in made and (path != name or isinstance(child, nn.ModuleList)):
                made[path] = above._modules[part] = _shallow(child)
    return twin


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _plan(model: nn.Module) -> tuple[dict[str, tuple[list[str], list[str]]], str]:
    """The plan, and the name of the list of layers in it."""
    plan: dict[str, tuple[list[str], list[str]]] = getattr(model, "_pp_plan", None) or {}
    lists = [name for name in plan if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1:
        raise TypeError(
            f"{type(model).__name__} has no _pp_plan with one list of layers, so nothing says where it may be cut; "
            "give a list of layers, an nn.Sequential, or stages of your own"
        )
    return plan, lists[0]


def _replace(model: nn.Module, name: str, instead: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, instead)
