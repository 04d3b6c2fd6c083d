"""The objects of one training run on one rank, which a save or a move reads and a load or a move fills."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from par_groups import Sharding

from .conversion import Conversion
from .model import Model, Names


@dataclass(frozen=True, kw_only=True)
class State:
    """Model, optimizer and further state on one rank, and the names under which ranks exchange their tensors.

    Args:
        model: Module (plain, wrapped, with FSDP2 or other DTensors, or with `Sharding` metadata), or a mapping of
            tensors. None on a rank without a part of the model.
        optimizer: Optimizer. It needs `model` for the names of its parameters, unless it was made from named
            parameters.
        scheduler: LR scheduler or list of LR schedulers; any object with `state_dict()` and `load_state_dict()`.
        extra: Numbers, strings, containers and tensors.
        layout: `Sharding` of local tensors by name, for tensors without sharding metadata of their own.
        names: Map from a tensor's name in the model to its name in the exchange: a dict, pairs of (pattern,
            replacement), or a function.
        convert: Function from a tensor's name in the model and its global shape to the slices of the tensors in the
            exchange that make it up, or to None if it is exchanged unchanged. Default: the conversion that Transformers
            applies to its own models.
    """

    model: Model | None = None
    optimizer: Optimizer | None = None
    scheduler: object = None
    extra: object = None
    layout: Mapping[str, Sharding] | None = None
    names: Names | None = None
    convert: Conversion | None = None

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing of the run."""
        return all(each is None for each in (self.model, self.optimizer, self.scheduler, self.extra))

    def check_types(self) -> None:
        """Raise TypeError unless the model and the optimizer are what they must be."""
        if self.model is not None and not isinstance(self.model, nn.Module | Mapping):
            raise TypeError(f"model is a {type(self.model).__name__}; pass a module, or a mapping of tensors by name")
        # Wrappers of an optimizer need not be torch's class.
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"optimizer is a {type(self.optimizer).__name__} without param_groups; pass an optimizer")
