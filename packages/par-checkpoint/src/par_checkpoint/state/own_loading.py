"""Hooks and methods of modules and optimizers that run when torch loads them, in addition to filling tensors.

A load fills the memory of tensors directly, without `load_state_dict`. Hooks and methods that users have added there
must still run: they rename keys, convert old formats, and recompute values that depend on weights. The hooks of torch
and of these packages are left out, because they work with tensors that are filled in place.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import DISTRIBUTIONS, SCALARS, original_name

from .._errors import UNDEFINED, CheckpointError, taken
from .._torch_private import (
    incompatible_keys,
    load_from_state_dict,
    optimizer_load_hooks,
    optimizer_state_hooks,
    post_load_hooks,
    pre_load_hooks,
)
from .model import Model, local_of, storage_of, unwrapped

_OURS = tuple(name.replace("-", "_") for name in DISTRIBUTIONS)
_OF_TORCH = ("state", "param_groups")  # what every optimizer has in its state dict


def is_foreign(function: Callable[..., object]) -> bool:
    """Return whether a hook or method belongs neither to torch nor to these packages."""
    # torch and our packages bind arguments to hooks, and only the innermost function shows who wrote it.
    while isinstance(function, partial):
        function = function.func
    package = _package_of(getattr(function, "__module__", None) or type(function).__module__)
    return package != "torch" and package not in _OURS


def _package_of(module: str) -> str:
    return module.partition(".")[0]


class ModuleLoading:
    """Parts of torch's `load_state_dict` that must run after a model was filled.

    Args:
        model: Loaded model; in a mapping, objects are set under their names.
    """

    def __init__(self, model: Model | None) -> None:
        inner = None if model is None else unwrapped(model)
        self._mapping = inner if isinstance(inner, MutableMapping) else None
        self._root = inner if isinstance(inner, nn.Module) else None
        self._by_root = self._root is not None and is_foreign(self._root.load_state_dict)
        modules = {} if self._root is None else dict(self._root.named_modules(remove_duplicate=False))
        self._versions: Mapping[str, Mapping[str, Any]] = {}  # of the formats of modules, by name
        self._loaders = {
            name
            for name, module in modules.items()
            if is_foreign(module._load_from_state_dict) or any(map(is_foreign, pre_load_hooks(module)))
        }
        self._hooked = {name for name, module in modules.items() if any(map(is_foreign, post_load_hooks(module)))}

    def __bool__(self) -> bool:
        """Return whether any code that is not ours must run."""
        return bool(self._by_root or self._loaders or self._hooked)

    def takes(self, name: str) -> bool:
        """Return whether some code reads an object of this name from the state dict, in addition to extra state."""
        if self._root is None or self._by_root:
            return True
        parents = name.split(".")[:-1]
        above = {original_name(f"{loader}.").removesuffix(".") for loader in self._loaders}
        # A module that loads itself receives the entries of all modules below it.
        return any(".".join(parents[:depth]) in above for depth in range(len(parents) + 1))

    def check(self) -> None:
        """Check that a module which loads itself can be given its state dict again.

        Raises:
            ValueError: The state dict shows other tensors than the module's, as where parameters are away.
        """
        if self._root is None or not (self._by_root or self._loaders):
            return
        own = {
            **dict(self._root.named_parameters(remove_duplicate=False)),
            **dict(self._root.named_buffers(remove_duplicate=False)),
        }
        for name, value in self._root.state_dict(keep_vars=True).items():
            tensor = own.get(name)
            is_other = tensor is not None and value is not tensor and storage_of(value) != storage_of(tensor)
            if is_other and (
                self._by_root or any(not loader or name.startswith(f"{loader}.") for loader in self._loaders)
            ):
                raise ValueError(
                    f"{name!r} in the state dict is another tensor than in the module, whose own loading (a pre-hook "
                    "of load_state_dict, _load_from_state_dict or load_state_dict) cannot be called with it; load "
                    "before the module is sharded, or use a post-hook of load_state_dict"
                )

    def run_(self, objects: Mapping[str, object], *, strict: bool) -> None:
        """Load modules that load themselves from their own tensors; set objects, and call hooks.

        Args:
            objects: Entries of the checkpoint other than tensors, by name in the state dict.
            strict: Whether an object that no code reads is an error.

        Raises:
            CheckpointError: The module's own loading failed.
        """
        if self._mapping is not None:
            known = {key: objects[original_name(key)] for key in self._mapping if original_name(key) in objects}
            self._mapping.update(known)
        if self._root is None:
            return
        if not self:
            self._set_extra_state_(objects)
            return
        state: Any = self._root.state_dict(keep_vars=True)
        # Wrappers such as DDP and torch.compile add prefixes to names, and checkpoints never contain them.
        names = {original_name(key): key for key in state}
        state.update({names.get(name, name): value for name, value in objects.items()})
        if self._by_root:
            # The default is strict. An own `load_state_dict` may lack the argument, so it is passed only if needed.
            self._root.load_state_dict(state) if strict else self._root.load_state_dict(state, strict=False)
            return
        self._versions = getattr(state, "_metadata", {})
        problems = self._load_(self._root, "", state, loads=False)
        if problems and strict:
            raise CheckpointError(
                f"model={type(self._root).__name__}: its own loading reports: {'; '.join(problems)}; correct it, or "
                f"pass strict=False{UNDEFINED}"
            )

    def _set_extra_state_(self, objects: Mapping[str, object]) -> None:
        """Set the extra state of modules that do nothing else of their own, without a look at the state dict."""
        modules = dict(self._root.named_modules()) if self._root is not None and objects else {}
        for name, module in modules.items():
            key = original_name(f"{name}._extra_state" if name else "_extra_state")
            if key in objects and type(module).set_extra_state is not nn.Module.set_extra_state:
                with taken(f"{key!r}"):
                    module.set_extra_state(objects[key])

    def _load_(self, module: nn.Module, name: str, state: Any, *, loads: bool) -> list[str]:
        """Load modules as torch does, from the first module on that loads itself; return descriptions of the errors."""
        prefix, problems = f"{name}." if name else "", list[str]()
        loads = loads or name in self._loaders
        missing, unexpected = list[str](), list[str]()
        wrong = missing, unexpected, problems
        extra = f"{prefix}_extra_state"
        if loads:
            state = {key: value for key, value in state.items() if key.startswith(prefix)}
            # The method may clear its tensors before it reads the values from the state dict, which shares their
            # memory.
            if is_foreign(module._load_from_state_dict):
                state.update({key: _apart(value) for key, value in state.items() if "." not in key[len(prefix) :]})
            load_from_state_dict(module, state, prefix, dict(self._versions.get(name, {})), wrong)
        elif extra in state and type(module).set_extra_state is not nn.Module.set_extra_state:
            with taken(f"{extra!r}"):
                module.set_extra_state(state[extra])
        for part, child in module.named_children():
            problems += self._load_(child, f"{prefix}{part}", state, loads=loads)
        for hook in post_load_hooks(module):
            if is_foreign(hook):
                hook(module, incompatible_keys(missing, unexpected))
        return problems + [f"nobody takes {key!r}" for key in unexpected]


def _apart(value: object) -> object:
    """Return a copy of a tensor with memory of its own; any other value unchanged."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def holders(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that hold the state: an optimizer itself, or those inside an optimizer of our packages."""
    if _package_of(type(optimizer).__module__) not in _OURS:
        return [optimizer]
    groups = {id(group) for group in optimizer.param_groups}
    found = []
    for value in vars(optimizer).values():
        for one in value if isinstance(value, tuple) else (value,):
            # An optimizer that wraps this one, such as one of par-precision, is not inside of it.
            if not isinstance(one, Optimizer) or any(own is optimizer for own in vars(one).values()):
                continue
            if any(id(group) in groups for group in one.param_groups):
                found += holders(one)
    return found or [optimizer]


def loads_itself(optimizer: Optimizer | None) -> bool:
    """Return whether code that is not ours runs when an optimizer is loaded."""
    if optimizer is None:
        return False
    return any(
        is_foreign(function)
        for one in holders(optimizer)
        for function in (
            one.load_state_dict,
            one.__setstate__,
            *(hook for hooks in optimizer_load_hooks(one) for hook in hooks),
        )
    )


def own_entries(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return the entries of each holder's state dict that a subclass or a hook adds to state and param groups.

    Raises:
        ValueError: The state dict contains other state or options than the optimizer holds, or lacks those of an
            optimizer inside of it.
    """
    found = []
    for one in holders(optimizer):
        entries: dict[str, object] = {}
        if any(map(is_foreign, (one.state_dict, *optimizer_state_hooks(one)))):
            shown = one.state_dict()
            _check_shown(one, shown)
            entries = {key: value for key, value in shown.items() if key not in _OF_TORCH}
        _check_inner(one)
        found.append(entries)
    return found


def _check_inner(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer steps the same tensors by one inside of it, whose state it does not hold."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for name, inner in vars(optimizer).items():
        # Wrappers that share the state of the inner optimizer lose nothing, because the state is saved once.
        if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
            continue
        if any(tensor in inner.state and tensor.numel() for tensor in tensors):
            raise ValueError(
                f"optimizer={type(optimizer).__name__}: the {type(inner).__name__} in its {name} has state of the same "
                "parameters, which would be lost; pass that one as the optimizer"
            )


def _check_shown(optimizer: Optimizer, shown: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state dict holds the state and the options of an optimizer as they are."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    state = shown.get("state", {})
    alike = len(shown.get("param_groups", ())) == len(optimizer.param_groups) and all(
        _is_same(state.get(number, {}), optimizer.state.get(tensor, {})) for number, tensor in enumerate(tensors)
    )
    for group, own in zip(shown.get("param_groups", ()), optimizer.param_groups, strict=False):
        alike = alike and _is_same({**group, "params": None}, {**own, "params": None})
    if not alike:
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: its state_dict() shows other state or options than it holds, which "
            "a checkpoint of named tensors cannot keep; pass its state_dict() as `extra`, and call load_state_dict "
            "with it"
        )


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are one object, equal, or mappings of such values."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or type(one) is not type(other):
        return False
    return bool(one == other)


def reload_(optimizer: Optimizer, own: Sequence[Mapping[str, object]]) -> None:
    """Run the end of torch's `load_state_dict`, and the optimizer's own code in it.

    Args:
        optimizer: Optimizer whose state and options are set.
        own: Return value of `own_entries` for each holder, from the save.
    """
    for number, one in enumerate(holders(optimizer)):
        entries = own[number] if number < len(own) else {}
        before, after = optimizer_load_hooks(one)
        if entries or any(map(is_foreign, (one.load_state_dict, *before))):
            # torch casts state to the dtype of the parameters here, which would round fp32 state of bf16 parameters.
            held = _HeldModule(one)
            one.load_state_dict({**one.state_dict(), **entries})
            held.put_back_(one)
            continue
        # Fills in what this version of torch or a subclass sets itself, such as how AdamW decays weights.
        one.__setstate__({key: vars(one)[key] for key in _OF_TORCH if key in vars(one)})
        for hook in after:
            if is_foreign(hook):
                hook(one)


def takes_entries(optimizer: Optimizer, own: Sequence[Mapping[str, object]]) -> list[bool]:
    """Return whether an optimizer has code that reads each saved list of entries."""
    here = holders(optimizer)
    return [
        number < len(here)
        and any(map(is_foreign, (here[number].load_state_dict, *optimizer_load_hooks(here[number])[0])))
        for number in range(len(own))
    ]


class _HeldModule:
    """The tensors that an optimizer holds, before its own `load_state_dict` casts state to the dtype of parameters.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._state = {key: dict(slots) for key, slots in optimizer.state.items() if isinstance(key, torch.Tensor)}
        self._options = [dict(group) for group in optimizer.param_groups]

    def put_back_(self, optimizer: Optimizer) -> None:
        """Restore tensors if the current ones are their copies, perhaps in a less exact dtype."""
        for tensor, slots in self._state.items():
            _put_back_(optimizer.state.get(tensor, {}), slots)
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            _put_back_(group, {key: value for key, value in options.items() if key != "params"})


def _put_back_(now: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    for key, value in before.items():
        new = now.get(key)
        is_copy = isinstance(value, torch.Tensor) and isinstance(new, torch.Tensor) and _is_copy(new, value)
        if is_copy or (key == SCALARS and key in now):
            now[key] = value


def _is_copy(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor holds the values of another tensor, cast to its dtype."""
    if one is other or one.shape != other.shape:
        return one is other
    here, there = local_of(one), local_of(other).to(one.device, one.dtype)
    return bool(((here == there) | ((here != here) & (there != there))).all())  # noqa: PLR0124 - NaN is a copy of NaN
