"""Records: objects that a module takes or returns for the values in them, such as those of a dataclass."""

import copy
import dataclasses
from collections.abc import MutableMapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from par_groups import slotted_attributes


def is_record(value: Any) -> bool:
    """Return whether an object only holds values, so that a copy with other values can replace it.

    Objects with methods of their own, such as a cache of keys and values, are not: a forward may change them, and
    their owner looks for the change in the object that it has.
    """
    kind = type(value)
    if isinstance(value, type | nn.Module) or kind.__module__ == "builtins":
        return False
    # A subclass, such as PackedSequence: torch's pytree takes only plain tuples apart. Nobody can write into it.
    if isinstance(value, tuple):
        return True
    if dataclasses.is_dataclass(value) or isinstance(value, MutableMapping | SimpleNamespace):
        return True
    if hasattr(kind, "__attrs_attrs__") or isinstance(value, torch.distributions.Distribution):
        return True
    # Any other class counts as a record if it has no methods or properties, but for special ones such as `__init__`.
    own = [each for each in kind.__mro__ if each.__module__ != "builtins"]
    return bool(own) and not any(
        isinstance(member, FunctionType | property | classmethod | staticmethod) and not name.startswith("__")
        for each in own
        for name, member in vars(each).items()
    )


def parts_of_record(record: Any) -> dict[str, Any]:
    """Return the values in a record, by key, by index or by name of the attribute."""
    if isinstance(record, list | tuple):
        return {str(index): value for index, value in enumerate(record)}
    if isinstance(record, MutableMapping):
        return dict(record)
    found = dict(getattr(record, "__dict__", {}))
    return found | {name: getattr(record, name) for name in slotted_attributes(type(record)) if hasattr(record, name)}


def with_parts(record: Any, parts: dict[str, Any]) -> Any:
    """Return a copy of a record with some values replaced; works for a frozen dataclass, too."""
    if isinstance(record, tuple):
        # The class may need other arguments than its items, or compute them anew from these.
        made = tuple.__new__(type(record), [parts.get(str(index), value) for index, value in enumerate(record)])
        getattr(made, "__dict__", {}).update(getattr(record, "__dict__", {}))
        return made
    changed = copy.copy(record)
    for name, value in parts.items():
        if isinstance(changed, MutableMapping):
            changed[name] = value
        elif isinstance(changed, list):
            changed[int(name)] = value
        else:
            # A frozen dataclass refuses ordinary assignment, and the copy belongs to nobody yet.
            object.__setattr__(changed, name, value)
    return changed
