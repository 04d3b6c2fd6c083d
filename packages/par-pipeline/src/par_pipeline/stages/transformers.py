"""Stages of a Hugging Face Transformers model, partitioned by its `_pp_plan`. transformers itself is not imported.

A model without a complete `_pp_plan` receives one from a trial.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from typing import cast

from torch import nn

from .._torch_private import children_of
from .images import problem_of_images
from .trial import find_plan
from .twins import TOWER, StagePlan, split


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that can be partitioned into stages.

    Raises:
        TypeError: The model cannot be split into stages.
    """
    _, name = _plan(model)
    return list(cast("nn.ModuleList", model.get_submodule(name)))


def cut(model: nn.Module, runs: Sequence[range], first: int) -> list[nn.Module]:
    """Make stages that share their modules with the model, which stays unchanged.

    The first stage takes token ids [rows, time], any other stage hidden states [rows, time, width]. A stage returns
    hidden states; the last stage returns logits [rows, time, words].

    Args:
        model: Model with all its layers.
        runs: Positions of the layers of each stage.
        first: Number of layers of the model's first stage, which has the encoder of images.

    Raises:
        ValueError: Later stages would need features of images.
        TypeError: The model cannot be split, has a module with parameters that runs on no stage, or has layers that
            return more than hidden states.
    """
    plan, layers = _plan(model)
    # Every rank knows the first stage's layers, so that all of them raise.
    vision = getattr(getattr(model, "config", None), "vision_config", None)
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if deep > first and any(takes == TOWER for takes, _ in plan.values()):
        raise ValueError(
            f"{type(model).__name__} adds features of images behind its first {deep} layers (deepstack), and the first "
            f"stage, which has the images, has {first} layers; use fewer stages, or other weights in `method`"
        )
    return split(model, plan, layers, runs)


def _plan(model: nn.Module) -> tuple[StagePlan, str]:
    """Return the model's plan, and the name of the list of layers in it.

    A plan that a trial finds becomes the model's own `_pp_plan`: later calls may see a model that is sharded already,
    which cannot run on one rank.
    """
    of_class = getattr(type(model), "_pp_plan", None) or {}
    of_instance: StagePlan = getattr(model, "_pp_plan", None) or {}
    modules = dict(model.named_modules(remove_duplicate=False))
    # In transformers up to about 5.4, the plan of the instance lacks entries that its class has, such as the head.
    for plan in (of_instance, {**of_class, **of_instance}):
        lists = [name for name in plan if isinstance(modules.get(name), nn.ModuleList)]
        if all(name in modules for name in plan) and len(lists) == 1 and not _unnamed(model, plan):
            if len(plan[lists[0]][1]) == 1:
                _check_layers(model, lists[0])
            return plan, lists[0]
    found = find_plan(model)
    (layers,) = [name for name in found if isinstance(modules[name], nn.ModuleList)]
    towers = _towers(model, found)
    found |= {name: (TOWER, ["image_features"]) for name in towers}
    if outside := _unnamed(model, found):
        raise TypeError(
            f"{type(model).__name__} has parameters in {outside}, which does not run between its embedding and its "
            "logits if it reads tokens alone, so no stage would run it; train it without a pipeline, or pass stages of "
            "your own"
        )
    if towers and (problem := problem_of_images(model, found, layers)):
        raise TypeError(
            f"{type(model).__name__} has an encoder of images in {towers[0]!r}, and its layers {layers!r} cannot be "
            f"split into stages: {problem}; train it without a pipeline, or pass stages of your own"
        )
    if len(found[layers][1]) == 1:
        _check_layers(model, layers)
    model.__dict__["_pp_plan"] = found
    return found, layers


def _towers(model: nn.Module, plan: Iterable[str]) -> list[str]:
    """Return the encoders of images and what projects their features, which run if the model receives pixels.

    They are the modules next to the language model that text alone does not reach.
    """
    named = [*plan]
    return [
        f"{path}.{child}" if path else child
        for path, module in model.named_modules()
        # Features of audio come from other arguments.
        if hasattr(type(module), "get_image_features") and not hasattr(type(module), "get_audio_features")
        for child, inside in children_of(module).items()
        if inside is not None and next(inside.parameters(), None) is not None
        if not any(f"{name}.".startswith(f"{path}.{child}.".lstrip(".")) for name in named)
    ]


def _unnamed(model: nn.Module, plan: Iterable[str]) -> str:
    """Return the outermost module with parameters that a plan assigns to no stage; empty if there is none.

    Every stage would train the head of a classifier if the plan names only the layers. It needs values that
    a single stage does not have, such as ids or all tokens.
    """
    named = {id(parameter) for name in plan for parameter in model.get_submodule(name).parameters()}
    for path, module in model.named_modules():
        if any(id(parameter) not in named for parameter in module.parameters(recurse=False)):
            paths = [path[:end] for end, letter in enumerate(f"{path}.") if letter == "."]
            outermost = next((one for one in paths if not any(f"{name}.".startswith(f"{one}.") for name in plan)), path)
            return f"{outermost!r} ({type(model.get_submodule(outermost)).__name__})"
    return ""


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
