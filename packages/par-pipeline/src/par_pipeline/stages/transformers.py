"""Stages of a Hugging Face Transformers model, partitioned by its own `_pp_plan`. transformers itself is not imported.

A stage is a copy of the model that shares all its modules, except for the layers of other stages, which are replaced by
`Absent` modules. The stage runs the model's own forward, including all code around the layers, and parameters keep
their names. Four hooks (`_Borders`) let hidden states enter and leave between two layers, because a model may scale its
embeddings before the first layer and its logits after the last.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from .._torch_private import children_of

_EMBEDS = "inputs_embeds"


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that can be partitioned into stages.

    Raises:
        TypeError: The model has no plan for pipelines.
    """
    _, name = _plan(model)
    return list(cast("nn.ModuleList", model.get_submodule(name)))


def cut(model: nn.Module, runs: Sequence[range]) -> list[nn.Module]:
    """Make stages that share their modules with the model, which stays unchanged.

    The first stage takes token ids [rows, time], any other stage hidden states [rows, time, width]. A stage returns
    hidden states; the last stage returns logits [rows, time, words].

    Args:
        model: Model with all its layers.
        runs: Positions of the layers of each stage.

    Raises:
        TypeError: The model has no plan for pipelines, a module with parameters that the plan does not name, or layers
            that return more than hidden states.
    """
    plan, layers = _plan(model)
    _check_named(model, plan)
    _check_layers(model, layers)
    count = len(layers_of(model))
    stages: list[nn.Module] = []
    for run in runs:
        stage, is_first, is_last = _twin(model, plan), run.start == 0, run.stop == count
        for name, (_, gives) in plan.items():
            if name != layers and not (is_first if gives == [_EMBEDS] else is_last):
                _replace(stage, name, Absent())
        # The code of the model loops over all layers, so absent layers stay in the list as identities.
        absent = {position: Absent() for position in range(count) if position not in run}
        for position, layer in absent.items():
            _replace(stage, f"{layers}.{position}", layer)
        _Borders(stage, before=absent.get(run.start - 1), after=absent.get(run.stop))
        stages.append(stage)
    return stages


class Absent(nn.Module):
    """Identity in place of a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return hidden states [rows, time, width] unchanged."""
        return hidden_states


class _Borders:
    """Hooks at the start and end of a stage's layers, and the hidden states that they hold during a forward.

    Args:
        stage: Model with this stage's layers. It is called with one positional tensor.
        before: Identity in place of the layer before this stage's layers; None for the first stage.
        after: Identity in place of the layer after this stage's layers; None for the last stage.
    """

    def __init__(self, stage: nn.Module, before: Absent | None, after: Absent | None) -> None:
        self._is_first, self._is_last = before is None, after is None
        self._entered: Tensor | None = None
        self._left: Tensor | None = None
        # Other hooks expect the keyword arguments of the model, so this hook runs first.
        stage.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if before is not None:
            before.register_forward_hook(self._go_on)
        if after is not None:
            after.register_forward_hook(self._note)
        # It also runs if the forward raises, so that no hidden states stay in memory.
        stage.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: nn.Module, args: tuple[Tensor], keywords: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Return the stage's input as keyword arguments of the model's forward."""
        (self._entered,) = args
        # A stage that is not the first one skips the embedding: models accept hidden states in its place.
        return (), {("input_ids" if self._is_first else _EMBEDS): self._entered, "use_cache": False, **keywords}

    def _go_on(self, *_: Any) -> Tensor | None:
        """Return the hidden states from the stage before, in place of the model's own changes to them."""
        return self._entered

    def _note(self, _: nn.Module, __: Any, hidden_states: Tensor) -> None:
        """Store the hidden states for the next stage."""
        self._left = hidden_states

    def _leave(self, _: nn.Module, __: Any, output: Any) -> Tensor | None:
        """Return the logits, or the hidden states for the next stage."""
        # The model applies its final norm to the output, so the hidden states are those noted behind the last own
        # layer.
        left, self._entered, self._left = self._left, None, None
        if output is None:  # the forward has raised
            return None
        logits: Tensor = output[0]
        return logits if self._is_last else left


def _twin(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Copy a model such that named modules can be replaced: their parents are copied, all other modules are shared."""
    twin = _shallow(model)
    made = {"": twin}
    for name in names:
        path = ""
        for part in name.split("."):
            above, path = made[path], f"{path}.{part}".lstrip(".")
            child = above.get_submodule(part)
            # Only modules whose children are replaced are copied. All other modules must stay shared with the model.
            if path not in made and (path != name or isinstance(child, nn.ModuleList)):
                made[path] = children_of(above)[part] = _shallow(child)
    return twin


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module: it shares children and parameters, but has its own tables of them and of its hooks."""
    twin = copy.copy(module)
    twin.__dict__.update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return twin


def _plan(model: nn.Module) -> tuple[dict[str, tuple[list[str], list[str]]], str]:
    """Return the model's plan, and the name of the list of layers in it.

    In transformers up to about 5.4, the plan of the instance lacks entries of the plan of its class, such as the head.
    """
    of_class = getattr(type(model), "_pp_plan", None) or {}
    plan: dict[str, tuple[list[str], list[str]]] = {**of_class, **(getattr(model, "_pp_plan", None) or {})}
    modules = dict(model.named_modules(remove_duplicate=False))
    absent = next((name for name in plan if name not in modules), None)
    if absent is not None:
        raise TypeError(
            f"the _pp_plan of {type(model).__name__} names {absent!r}, which this model does not have, so it "
            "cannot be split into stages; train it without a pipeline, or pass stages of your own"
        )
    lists = [name for name in plan if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        raise TypeError(
            f"{type(model).__name__} has no _pp_plan with one list of layers, so it cannot be split into stages; "
            "pass a list of layers, an nn.Sequential, or stages of your own"
        )
    return plan, lists[0]


def _check_named(model: nn.Module, plan: Iterable[str]) -> None:
    """Raise an error unless the plan assigns each parameter to a stage.

    Otherwise every stage would train a classifier's head, if the plan names only the layers, and every stage would run
    an image tower. Both need values that a single stage does not have, such as ids or all tokens.

    Raises:
        TypeError: A module with parameters is not in the plan.
    """
    named = {id(parameter) for name in plan for parameter in model.get_submodule(name).parameters()}
    for path, module in model.named_modules():
        if any(id(parameter) not in named for parameter in module.parameters(recurse=False)):
            paths = [path[:end] for end, letter in enumerate(f"{path}.") if letter == "."]
            outermost = next((one for one in paths if not any(f"{name}.".startswith(f"{one}.") for name in plan)), path)
            what = f"{outermost!r} ({type(model.get_submodule(outermost)).__name__})"
            raise TypeError(
                f"{type(model).__name__} has parameters in {what}, which its _pp_plan does not name, so no stage "
                "would run it; train it without a pipeline, or pass stages of your own"
            )


def _check_layers(model: nn.Module, layers: str) -> None:
    """Raise an error if a layer returns several values, such as the chosen tokens of sparse attention.

    A stage sends hidden states alone, so that the first layer of the next stage would lack the other values.

    Raises:
        TypeError: The code of a layer returns a tuple.
    """
    for kind in {type(layer) for layer in model.get_submodule(layers).children()}:
        try:
            # The code is read, because a call would need inputs that only the model can make.
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
        except (OSError, TypeError, SyntaxError):  # it was not read from a file
            continue
        if any(isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) for node in ast.walk(tree)):
            raise TypeError(
                f"{kind.__name__} of {type(model).__name__} returns more than hidden states to the next layer, but a "
                "stage sends only hidden states; train it without a pipeline, or pass stages of your own"
            )


def _replace(model: nn.Module, name: str, instead: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, instead)
