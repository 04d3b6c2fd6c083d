"""FSDP units: the modules whose parameters stage 3 gathers together, and the modules that a program calls directly."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from par_groups import original_name

from .._policies import Units


class UnitPlace(NamedTuple):
    """Unit and called modules of a parameter. Parameters with different values are packed in different chunks.

    Args:
        unit: Number of the unit.
        items: Numbers of the called modules that have the parameter.
    """

    unit: int
    items: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RegisteredUnit:
    """A unit of a module that has not run yet.

    Args:
        name: Name of the unit.
        modules: Number of its modules, which run one after the other; 0 if the unit has no parameters.
        outer: Numbers of the units around it.
    """

    name: str
    modules: int
    outer: frozenset[int]


def called(module: nn.Module) -> list[nn.Module]:
    """Return the modules that training calls.

    These are the module itself, or the items of a ModuleList or ModuleDict that defines no forward.
    """
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return [module]
    return list(dict.fromkeys(item for child in module.children() for item in called(child)))


def choose_units(root: nn.Module, units: Units, bucket: int) -> list[list[nn.Module]]:
    """Choose which modules are gathered together.

    Args:
        root: Module that is sharded.
        units: One of three kinds of values. "auto" selects the items with parameters of every ModuleList, ModuleDict
            and Sequential, but no items of items, unless only these are called; it joins neighbours until they have
            `bucket` bytes. A function returns True for each module that is a unit. A list contains the modules
            themselves.
        bucket: Size in bytes up to which neighbours are joined.

    Returns:
        Units, as lists of modules that run one after the other. The first is the root, for parameters in no other unit.

    Raises:
        TypeError: `units` is neither a string, nor a function, nor a list of modules.
        ValueError: `units` is another string than "auto", or has a module that is not in the root.
    """
    if isinstance(units, str):
        if units != "auto":
            raise ValueError(f"units is {units!r}; give 'auto', a function of a module, or a list of modules")
        return [[root], *_automatic(root, bucket)]
    if callable(units):
        chosen = [module for module in root.modules() if units(module)]
    elif not isinstance(units, Iterable):
        raise TypeError(f"units is {units!r}; give 'auto', a function of a module, or a list of modules")
    else:
        known = {id(module) for module in root.modules()}
        chosen = list(units)
        for module in chosen:
            if id(module) not in known:
                raise ValueError(
                    f"units has a {type(module).__name__} that is not in the module; give modules of its own"
                )
    return [[root], *([module] for module in chosen if module is not root)]


def _automatic(root: nn.Module, bucket: int) -> Iterator[list[nn.Module]]:
    """Yield the units of each called module, and, unless it is the root, the module for its rest."""
    apart = called(root)
    for module in apart:
        if module is not root and _has_parameters(module):
            yield [module]
        yield from _joined(_items(module, apart), bucket)


def _joined(modules: Iterable[nn.Module], bucket: int) -> Iterator[list[nn.Module]]:
    """Yield lists of neighbours that together have at most `bucket` bytes."""
    current: list[nn.Module] = []
    size = 0
    for module in modules:
        own = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        # A unit larger than the bucket stays a unit of its own.
        if current and size + own > bucket:
            yield current
            current, size = [], 0
        current.append(module)
        size += own
    if current:
        yield current


def _items(module: nn.Module, apart: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the items of containers within a module, except items that are called directly."""
    for child in module.children():
        if any(child is other for other in apart):
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and _has_parameters(child):
            # Items of this item belong to its unit, so the search does not continue inside.
            yield child
        else:
            yield from _items(child, apart)


def sections(root: nn.Module) -> list[nn.Module]:
    """Return the modules that backward finishes one after the other, as far as containers show it.

    These are the units of "auto", without joining, and the largest modules next to them. They include modules without
    parameters and modules that only communicate. The sections are equal on all ranks, regardless of shapes.

    Args:
        root: Module that is sharded.

    Returns:
        Sections in the order of the module tree. The first is the root, for parameters in no other section.
    """
    # A bucket of one byte joins nothing. Joined units would depend on the sizes of shards, which may differ between
    # ranks.
    units = {id(module) for unit in choose_units(root, "auto", bucket=1) for module in unit}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        is_outer = module is root or any(id(inner) in units for inner in module.modules() if inner is not module)
        if not is_outer or id(module) in units:
            yield module
        for child in module.children() if is_outer else ():
            yield from visit(child)

    return list({id(module): module for module in visit(root)}.values())


def unit_names(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[str]:
    """Return the units' names in errors.

    A name has the unit's first module, and its last module if there are several. The root is named by its class. Names
    do not depend on whether torch.compile wraps a module.
    """
    own = {module: original_name(f"{name}.").rstrip(".") for name, module in root.named_modules()}
    kind = [type(module).__name__ for module, name in own.items() if not name][-1]  # behind the wrapper is the root
    names = {id(module): repr(name) if name else f"the {kind}" for module, name in own.items()}
    return [" to ".join(names[id(module)] for module in dict.fromkeys((unit[0], unit[-1]))) for unit in units]


def outer_units(units: Sequence[Sequence[nn.Module]]) -> list[frozenset[int]]:
    """Return for each unit the numbers of the units around its first module, which run while it does."""
    within = [{inner for module in modules for inner in module.modules()} for modules in units]
    return [
        frozenset(other for other, inside in enumerate(within) if other != number and modules[0] in inside)
        for number, modules in enumerate(units)
    ]


def register_units(root: nn.Module, units: Sequence[Sequence[nn.Module]], used: Container[int]) -> list[RegisteredUnit]:
    """Return the description of units before they run.

    Args:
        root: Module that is sharded.
        units: Modules of each unit, as `choose_units` returns them.
        used: Numbers of the units that have parameters.
    """
    names, outer = unit_names(root, units), outer_units(units)
    return [
        RegisteredUnit(name=name.replace("'", ""), modules=len(modules) if number in used else 0, outer=around)
        for number, (name, modules, around) in enumerate(zip(names, units, outer, strict=True))
    ]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def places(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, UnitPlace]:
    """Return for each parameter its unit and the numbers of the modules that hold it and are called."""
    items: dict[nn.Parameter, tuple[int, ...]] = {}
    for number, module in enumerate(called(root)):
        for parameter in module.parameters():
            items[parameter] = (*items.get(parameter, ()), number)
    return {
        tensor: UnitPlace(unit, items[tensor])
        for tensor, unit in owners(root, units).items()
        if isinstance(tensor, nn.Parameter)
    }


def owners(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[torch.Tensor, int]:
    """Return the unit of each parameter and buffer: the innermost that holds it, or the root if several do."""
    numbers = {id(module): number for number, modules in enumerate(units) for module in modules}
    found: dict[torch.Tensor, int] = {}

    def visit(module: nn.Module, number: int) -> None:
        number = numbers.get(id(module), number)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # The root stays gathered for the full pass, so a tied tensor is available in all units that use it.
            found[tensor] = number if found.get(tensor, number) == number else 0
        for child in module.children():
            visit(child, number)

    visit(root, 0)
    return found


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all names of a module's parameters with their tensors, then the names of its buffers with theirs."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
