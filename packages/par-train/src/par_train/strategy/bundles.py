"""Which optimizer trains which models, found by the identity of their parameters. Nothing here communicates."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from par_groups import JointOptimizer, has_stepped
from par_layers import LossFactor
from par_plan import ModelSizes

MARK = "par_train"
"""The name of the attribute that `initialize` sets on each object that it has initialized."""


@dataclass(kw_only=True)
class ModelBundle:
    """Models that train together: the models, the one optimizer of their parameters, and its lr schedulers.

    Args:
        models: Usually one; several models may share the optimizer.
        optimizer: The optimizer; None for a model that only runs forward.
        schedulers: The lr schedulers of the optimizer.
        sizes: The sizes of this rank's part of the models, once its parameters exist.
        factor: The object that passes the factor of the main loss to the models' routers, once they are initialized.
    """

    models: list[nn.Module]
    optimizer: Optimizer | None = None
    schedulers: list[Any] = field(default_factory=list)
    sizes: ModelSizes | None = None
    factor: LossFactor | None = None

    @property
    def module(self) -> nn.Module:
        """The model; several models are one `nn.ModuleList`."""
        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    @property
    def loss_factor(self) -> LossFactor:
        """The `factor` of a bundle that `initialize` has returned."""
        assert self.factor is not None  # noqa: S101 - `initialize` has set it
        return self.factor

    def check_loss(self, loss: Tensor) -> None:
        """Check that a loss depends on a parameter of the models, by a walk through its graph.

        Activation checkpointing with use_reentrant=True hides the parameters inside from the graph, and a frozen model
        with adapters may have no other ones: then the method only warns.

        Raises:
            ValueError: The loss depends on none of them.
        """
        own = {id(parameter) for model in self.models for parameter in model.parameters()}
        opaque: str | None = None
        # An explicit stack, because graphs are deeper than Python's recursion limit.
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            # A leaf of the graph is an AccumulateGrad node, which has its parameter as `variable`.
            if id(getattr(node, "variable", None)) in own:
                return
            name = type(node).__name__
            opaque = name if name.startswith("CheckpointFunction") else opaque
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
        names = ", ".join(type(model).__name__ for model in self.models)
        problem = f"the loss does not depend on any parameter of {names}, which this optimizer trains"
        if opaque is None:
            raise ValueError(f"{problem}; pass the optimizer of the loss's own model")
        warnings.warn(
            f"{problem}, as far as can be seen through {opaque}; if it is the loss of another model, pass that model's "
            "optimizer; to be sure, use activation checkpointing with use_reentrant=False",
            stacklevel=3,
        )


def joined(given: Any) -> Any:
    """Return a list of optimizers as one optimizer, and any other object unchanged."""
    is_list = isinstance(given, list | tuple) and given and all(isinstance(one, Optimizer) for one in given)
    return JointOptimizer(*given) if is_list else given


def bundles_of(objects: Sequence[Any]) -> list[ModelBundle]:
    """Sort the arguments of `initialize` by kind and find which of them belong together. Changes nothing.

    Raises:
        ValueError, TypeError: An object cannot be initialized, or was initialized before.
    """
    kinds: dict[type, list[Any]] = {nn.Module: [], Optimizer: [], DataLoader: []}
    schedulers = []
    for given in objects:
        kind = next((kind for kind in kinds if isinstance(given, kind)), None)
        # `__dict__` is read directly: a wrapper may forward attributes of the object inside.
        if MARK in getattr(given, "__dict__", {}):
            raise ValueError(f"this {type(given).__name__} was initialized before; initialize it once")
        if kind is not None:
            kinds[kind].append(given)
        elif hasattr(given, "optimizer") and callable(getattr(given, "step", None)):
            schedulers.append(given)
        else:
            raise TypeError(
                f"initialize() received a {type(given).__name__}; it takes modules, optimizers, DataLoaders and lr "
                "schedulers" + ("; call Strategy.build(layers) first" if isinstance(given, list | tuple) else "")
            )
    if len({id(given) for given in objects}) < len(objects):
        raise ValueError("initialize() received an object twice; pass each object once")
    return find_bundles(kinds[nn.Module], kinds[Optimizer], schedulers)


def find_bundles(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], schedulers: Sequence[Any]
) -> list[ModelBundle]:
    """Find the models, optimizers and schedulers that belong together, in the order of the models.

    Raises:
        ValueError: An optimizer has stepped or holds a parameter of none of the models, a model has two optimizers,
            or the optimizer of a scheduler is missing.
    """
    owner = {id(parameter): number for number, model in enumerate(models) for parameter in model.parameters()}
    chosen: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for number in sorted(_models_of(optimizer, owner)):
            if number in chosen:
                raise ValueError(
                    f"a {type(models[number]).__name__} has two optimizers, {type(chosen[number]).__name__} and "
                    f"{type(optimizer).__name__}; pass them as a list, which becomes one optimizer, or use one "
                    "optimizer with a param group for each"
                )
            chosen[number] = optimizer
    bundles = [
        ModelBundle(
            models=[model for number, model in enumerate(models) if chosen.get(number) is optimizer],
            optimizer=optimizer,
            schedulers=[each for each in schedulers if each.optimizer is optimizer],
        )
        for optimizer in optimizers
    ]
    # A model without an optimizer only runs forward, such as a reference model, but is sharded like the others.
    bundles += [ModelBundle(models=[model]) for number, model in enumerate(models) if number not in chosen]
    for scheduler in schedulers:
        if not any(scheduler in each.schedulers for each in bundles):
            raise ValueError(
                f"initialize() received a {type(scheduler).__name__} without its optimizer; pass both in one call, "
                "with the optimizer that the scheduler was made with"
            )
    # Checkpoints name the folders of several models by this order, so it must not depend on the optimizers.
    return sorted(bundles, key=lambda each: min(models.index(model) for model in each.models))


def _models_of(optimizer: Optimizer, owner: dict[int, int]) -> set[int]:
    kind = type(optimizer).__name__
    if has_stepped(optimizer):
        raise ValueError(f"the {kind} has stepped already; initialize first, then load its state from a checkpoint")
    # The constructor of some optimizers, such as Adagrad, makes state. State on the meta device would stay there.
    if any(isinstance(parameter, Tensor) and parameter.is_meta for parameter in optimizer.state):
        raise ValueError(
            f"the {kind} has made state for parameters that are on the meta device until they are initialized; use an "
            "optimizer that makes its state in its first step"
        )
    found = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in owner:
                raise ValueError(
                    f"param_groups[{number}].params[{position}] of the {kind}, of shape {tuple(parameter.shape)}, "
                    "is a parameter of no model that initialize() received; pass its model in the same call"
                )
            found.add(owner[id(parameter)])
    if not found:
        raise ValueError(f"the {kind} has no parameters; pass an optimizer of the model's parameters")
    return found
