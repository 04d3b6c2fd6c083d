"""Which optimizer trains which models, by the identity of their parameters. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import has_stepped
from par_plan import ModelSizes

from .mixture.factor import LossFactor


@dataclass(kw_only=True)
class Pair:
    """Models, the one optimizer that has their parameters, and its schedulers; what is trained together.

    Args:
        models: Mostly one; several share the optimizer.
        optimizer: None: the model is only run.
        schedulers: The lr schedulers of the optimizer.
        sizes: What this rank has of the models, once that is known.
        factor: What tells routers of the models what the main loss is multiplied by, once they are initialized.
    """

    models: list[nn.Module]
    optimizer: Optimizer | None = None
    schedulers: list[Any] = field(default_factory=list)
    sizes: ModelSizes | None = None
    factor: LossFactor | None = None

    @property
    def module(self) -> nn.Module:
        """The model, or all of them as one module."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)


def find_pairs(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> list[Pair]:
    """Models, optimizers and schedulers that belong together, in the order of the models.

    Raises:
        ValueError: An optimizer that holds a parameter of no model here or has stepped, a model with two optimizers,
            a scheduler whose optimizer is not here.
    """
    owner = {id(parameter): number for number, model in enumerate(models) for parameter in model.parameters()}
    chosen: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for number in sorted(_models_of(optimizer, owner)):
            if number in chosen:
                raise ValueError(
                    f"a {type(models[number]).__name__} has two optimizers, {type(chosen[number]).__name__} and "
                    f"{type(optimizer).__name__}; give them as a list, which becomes one, or use one with a param "
                    "group for each"
                )
            chosen[number] = optimizer
    pairs = [
        Pair(
            models=[model for number, model in enumerate(models) if chosen.get(number) is optimizer],
            optimizer=optimizer,
            schedulers=[each for each in schedulers if each.optimizer is optimizer],
        )
        for optimizer in optimizers
    ]
    pairs += [Pair(models=[model]) for number, model in enumerate(models) if number not in chosen]
    for scheduler in schedulers:
        if not any(scheduler in each.schedulers for each in pairs):
            raise ValueError(
                f"the optimizer of the {type(scheduler).__name__} is not here; initialize them together, with the "
                "optimizer that the scheduler was made with"
            )
    return sorted(pairs, key=lambda each: min(models.index(model) for model in each.models))


def _models_of(optimizer: Optimizer, owner: dict[int, int]) -> set[int]:
    kind = type(optimizer).__name__
    if has_stepped(optimizer):
        raise ValueError(f"the {kind} has stepped already; initialize first, then load its state from a checkpoint")
    if any(isinstance(parameter, Tensor) and parameter.is_meta for parameter in optimizer.state):  # Adagrad's
        raise ValueError(
            f"the {kind} has made state for parameters that are on the meta device until they are initialized; give an "
            "optimizer that makes its state in its first step"
        )
    found = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in owner:
                raise ValueError(
                    f"param_groups[{number}].params[{position}] of the {kind}, of shape "
                    f"{tuple(parameter.shape)}, is a parameter of no model here; initialize its model with it"
                )
            found.add(owner[id(parameter)])
    if not found:
        raise ValueError(f"the {kind} has no parameters; give one that has a model's")
    return found
