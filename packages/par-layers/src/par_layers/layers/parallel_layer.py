"""What our layers have in common: their parameters keep their records, whatever torch puts in their place.

A record (how the parameter is cut, and how it is filled) is an attribute of one tensor object, and torch's own ways
with modules make new ones: `to_empty`, conversions, `load_state_dict(assign=True)`, copies.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from par_groups import Sharding, attributes, set_sharding

from .parameter import Init


@runtime_checkable
class HasInit(Protocol):
    """A parameter that knows how it is cut and how it is filled."""

    par_sharding: Sharding
    par_init: Init


class ParallelLayer(nn.Module):
    """A layer whose parameters come from `make_parameter`, or were whole ones of another model and have been cut."""

    records: tuple[str, ...] = (attributes.SHARDING.name, "par_init")
    """The attributes that each of its parameters has."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to_empty`, `to` and the like call; a parameter that leaves the meta device stays the same object."""
        before = dict(self._parameters)
        abstract = {name for name, parameter in before.items() if parameter is not None and parameter.is_meta}
        with _records_kept(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name in abstract:  # else a shared table would become two
                old, new = before[name], self._parameters[name]
                if old is not new:
                    torch.utils.swap_tensors(old, new)
                    self._parameters[name] = old
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with _records_kept(self):
            super()._load_from_state_dict(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with tensors of its own; what says how they are cut, process groups among it, is shared."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        own = {key: copy.deepcopy(value, memo) for key, value in state.items() if isinstance(value, _COPIED)}
        made.__setstate__({**state, **own})  # type: ignore[no-untyped-call]
        for name, parameter in _with_records(self):
            _put_back(made._parameters[name], parameter.shape, parameter.par_sharding, _init_of(parameter))
        return made


def check_records(model: nn.Module, record: str = attributes.SHARDING.name) -> None:
    """Raises RuntimeError if a parameter of our layers has lost its record.

    Args:
        model: A model with layers of ours, or one that was cut in place; other layers are left alone.
        record: The name of the attribute that each parameter must have.
    """
    for path, module in model.named_modules():
        ours = record in module.records if isinstance(module, ParallelLayer) else RECORDS_OF_MODULE in module.__dict__
        if ours and (isinstance(module, ParallelLayer) or record == attributes.SHARDING.name):
            for name, parameter in module.named_parameters(path, recurse=False):
                if not hasattr(parameter, record):
                    raise RuntimeError(
                        f"{name!r}, a {type(parameter).__name__} of shape {tuple(parameter.shape)}, is not the "
                        "parameter that its layer was made with and does not say how it is cut over the tensor group. "
                        "FSDP2's fully_shard over these layers is not supported: use par-zero. Parameters of your own "
                        "need par_groups.set_sharding, and to be filled by you"
                    )


RECORDS_OF_MODULE = "par_records"
"""The attribute of other modules whose parameters have records, as those of a model that was cut in place."""

_COPIED = (Tensor, nn.Module, dict, list, set)  # what deepcopy copies; rules, grids, groups and functions are shared


@contextmanager
def _records_kept(module: nn.Module) -> Iterator[None]:
    """A context: the parameters that the module has at its end get the records of those that it had before."""
    before = [
        (name, parameter.shape, parameter.par_sharding, _init_of(parameter))
        for name, parameter in _with_records(module)
    ]
    try:
        yield
    finally:
        for name, shape, sharding, init in before:
            _put_back(module._parameters[name], shape, sharding, init)


def _with_records(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in module._parameters.items() if attributes.SHARDING.is_on(parameter))


def _init_of(parameter: Tensor) -> Init | None:
    """How a parameter is filled; None for one of a model that was not written against a layer set."""
    return parameter.par_init if isinstance(parameter, HasInit) else None


def _put_back(parameter: Tensor | None, shape: torch.Size, sharding: Sharding, init: Init | None) -> None:
    """Gives a parameter its record, unless it is no longer the part that the record is about, as FSDP2's DTensors."""
    if parameter is not None and parameter.shape == shape and not hasattr(parameter, "placements"):
        set_sharding(parameter, sharding)
        if init is not None:
            parameter.par_init = init  # type: ignore[attr-defined]  # a tensor takes attributes
