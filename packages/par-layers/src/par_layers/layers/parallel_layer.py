"""Base class of this package's layers: it preserves sharding metadata when torch replaces a parameter.

The metadata (sharding and initialization) are attributes of one tensor object. torch creates a new tensor object in
`to_empty`, conversions, `load_state_dict(assign=True)` and deep copies.
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
    """A parameter with sharding metadata and an initialization rule."""

    par_sharding: Sharding
    par_init: Init


class ParallelLayer(nn.Module):
    """A layer whose parameters were created by `make_parameter`, or were sharded from an existing model."""

    records: tuple[str, ...] = (attributes.SHARDING.name, "par_init")
    """Attributes of each of its parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion, as `to` and `to_empty` do. A parameter that leaves the meta device stays the same object.

        Args:
            fn: Function of each tensor.
            recurse: Whether to convert child modules.
        """
        before = dict(self._parameters)
        abstract = {name for name, parameter in before.items() if parameter is not None and parameter.is_meta}
        with _records_kept(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            # Without the swap, a tied embedding would become two parameters.
            for name in abstract:
                old, new = before[name], self._parameters[name]
                if old is not new:
                    torch.utils.swap_tensors(old, new)
                    self._parameters[name] = old
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with _records_kept(self):
            super()._load_from_state_dict(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with its own tensors. Rules, grids and process groups, which cannot be copied, are shared."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        own = {key: copy.deepcopy(value, memo) for key, value in state.items() if isinstance(value, _COPIED)}
        made.__setstate__({**state, **own})  # type: ignore[no-untyped-call]
        # torch's deep copy of a parameter drops its attributes.
        for name, parameter in _with_records(self):
            _put_back(made._parameters[name], parameter.shape, parameter.par_sharding, _init_of(parameter))
        return made


def check_records(model: nn.Module, record: str = attributes.SHARDING.name) -> None:
    """Raise RuntimeError if a parameter of this package's layers has lost its metadata.

    Args:
        model: A model with layers of this package, or a model that was sharded in place. Other layers are ignored.
        record: Name of the attribute that each parameter must have.
    """
    for path, module in model.named_modules():
        ours = record in module.records if isinstance(module, ParallelLayer) else RECORDS_OF_MODULE in module.__dict__
        # A model that was sharded in place has sharding metadata but no init rules.
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
"""Attribute of other modules whose parameters have sharding metadata, in a model that was sharded in place."""

_COPIED = (Tensor, nn.Module, dict, list, set)  # what deepcopy copies; rules, grids, groups and functions are shared


@contextmanager
def _records_kept(module: nn.Module) -> Iterator[None]:
    """Copy the metadata of parameters, at the end of a `with` block, to the parameters that replaced them."""
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
    """Return the initialization rule of a parameter; None if its model was not written against a layer set."""
    return parameter.par_init if isinstance(parameter, HasInit) else None


def _put_back(parameter: Tensor | None, shape: torch.Size, sharding: Sharding, init: Init | None) -> None:
    """Attach metadata to a parameter, unless it is no longer the same shard, for example an FSDP2 DTensor."""
    if parameter is not None and parameter.shape == shape and not hasattr(parameter, "placements"):
        set_sharding(parameter, sharding)
        if init is not None:
            parameter.par_init = init  # type: ignore[attr-defined]  # a tensor takes attributes
