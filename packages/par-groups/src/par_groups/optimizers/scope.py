"""Update scope of an optimizer, looked up by its class."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from .classes import KNOWN, WIDER, UpdateScope

_NOT_IN_A_STEP = {
    *("__init__", "__repr__", "__setstate__", "__getstate__", "__init_subclass__", "__class_getitem__"),
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__firstlineno__", "__static_attributes__", "__slots__", "__parameters__"),
    *("__orig_bases__", "__abstractmethods__", "_abc_impl", "__hash__", "__eq__", "__reduce__", "__deepcopy__"),
    *("zero_grad", "state_dict", "load_state_dict", "add_param_group"),
}
"""Names that a subclass of a listed class may define: its step does the same."""


def update_scope_of(optimizer: Optimizer, group: Mapping[str, Any]) -> UpdateScope:
    """Return the tensors on which an optimizer's update of an element depends.

    A subclass has the scope of its listed base class if it overrides nothing that a step may call. A subclass with its
    own `step`, `train` or `eval` has the scope `UNKNOWN`.

    Args:
        optimizer: Optimizer whose class is looked up.
        group: Param group; some settings widen the scope, such as a norm over all gradients.
    """
    if _has_own_step(optimizer):
        return UpdateScope.UNKNOWN
    classes = type(optimizer).__mro__
    for number, kind in enumerate(classes):
        package, scope = _listed(kind)
        if scope is UpdateScope.UNKNOWN:
            continue
        if any(_changes_step(below, kind) for below in classes[:number]):
            return UpdateScope.UNKNOWN
        wider = [more for name, more in WIDER.get(package, {}).items() if group.get(name)]
        return max([scope, *wider], key=list(UpdateScope).index)
    return UpdateScope.UNKNOWN


def _changes_step(below: type, listed: type) -> bool:
    """Return whether a subclass defines a name that a step of its listed class may call."""
    names = {name for name in vars(below) if hasattr(listed, name) or name in {"train", "eval"}} - _NOT_IN_A_STEP
    step: Any = getattr(listed, "step", None)
    if "step" in names and inspect.unwrap(below.__dict__["step"]) is inspect.unwrap(step):
        # torch puts a wrapper with hooks into the class of the first optimizer that is made.
        names.remove("step")
    return bool(names)


def _listed(kind: type) -> tuple[str, UpdateScope]:
    """Return the package under which a class is listed, and its scope."""
    module = kind.__module__
    # The longest listed name wins: `lion_pytorch.cautious_lion` has another scope than `lion_pytorch`.
    while module:
        for scope, names in KNOWN.get(module, {}).items():
            if kind.__qualname__ in names.split():
                return module, scope
        module = module.rpartition(".")[0]
    return "", UpdateScope.UNKNOWN


def _has_own_step(optimizer: Optimizer) -> bool:
    """Return whether a function of another origin replaced this optimizer's `step`.

    An lr scheduler and torch.compile replace `step`, too, but with wrappers of the class's own function.
    """
    replaced = vars(optimizer).get("step")
    if replaced is None:
        return False
    steps = {inspect.unwrap(vars(kind)["step"]) for kind in type(optimizer).__mro__ if "step" in vars(kind)}
    seen: set[int] = set()
    # Wrappers can refer to each other in a circle, which `seen` ends.
    while replaced is not None and id(replaced) not in seen:
        if replaced in steps:
            return False
        seen.add(id(replaced))
        inner = (getattr(replaced, name, None) for name in ("_torchdynamo_orig_callable", "__func__", "__wrapped__"))
        replaced = next((each for each in inner if each is not None), None)
    return True
