"""Which modules are called by themselves, and which form a unit: the grain of gathering at stage 3."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .._policies import Units


class UnitPlace(NamedTuple):
    """Where a parameter belongs. Parameters of different places lie in different chunks.

    Args:
        unit: Number of the unit.
        items: Numbers of the called modules that have the parameter.
    """

    unit: int
    items: tuple[int, ...]


def called(module: nn.Module) -> list[nn.Module]:
    """What of a module is called in training: itself, or of a ModuleList or ModuleDict without a forward its items."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return [module]
    return list(dict.fromkeys(item for child in module.children() for item in called(child)))


def choose_units(root: nn.Module, units: Units, bucket: int) -> list[list[nn.Module]]:
    """Chooses which modules are gathered together.

    Args:
        root: The module that is sharded.
        units: "auto", for the items of every ModuleList, ModuleDict and Sequential that have parameters, but no items
            of items, unless these are all that is called; neighbours together until they have `bucket` bytes. Or a
            function that is True of a module that is a unit, or the modules themselves.
        bucket: Size in bytes up to which neighbours are joined.

    Returns:
        The units, as lists of modules that run one after the other. The first is the root, for parameters that are in
        no other unit.

    Raises:
        TypeError: What is neither a word, nor a function, nor modules.
        ValueError: A word that is not "auto", or a module that is not in the root.
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
    """The units within each module that is called, and, unless it is the root, the module for the rest."""
    apart = called(root)
    for module in apart:
        if module is not root and _has_parameters(module):
            yield [module]
        yield from _joined(_items(module, apart), bucket)


def _joined(modules: Iterable[nn.Module], bucket: int) -> Iterator[list[nn.Module]]:
    """Neighbours together, as long as they have no more than that many bytes."""
    current: list[nn.Module] = []
    size = 0
    for module in modules:
        own = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        if current and size + own > bucket:
            yield current
            current, size = [], 0
        current.append(module)
        size += own
    if current:
        yield current


def _items(module: nn.Module, apart: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The items of containers within a module, without those that are called by themselves."""
    for child in module.children():
        if any(child is other for other in apart):
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and _has_parameters(child):
            yield child
        else:
            yield from _items(child, apart)


def sections(root: nn.Module) -> list[nn.Module]:
    """Which modules backward leaves behind one after the other, as far as containers tell.

    These are the units of "auto", each by itself, and the largest modules beside them, those too that only exchange
    with other ranks or that have no parameters. All ranks have them alike, whatever the sizes.

    Args:
        root: The module that is sharded.

    Returns:
        The sections in the order of the module tree. The first is the root, for parameters that are in no other.
    """
    units = {id(module) for unit in choose_units(root, "auto", bucket=1) for module in unit}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        is_outer = module is root or any(id(inner) in units for inner in module.modules() if inner is not module)
        if not is_outer or id(module) in units:
            yield module
        for child in module.children() if is_outer else ():
            yield from visit(child)

    return list({id(module): module for module in visit(root)}.values())


def unit_names(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[str]:
    """What errors call the units: their first module, and the last if there are several; the root by its class."""
    names = {id(module): repr(name) if name else f"the {type(root).__name__}" for name, module in root.named_modules()}
    return [" to ".join(names[id(module)] for module in dict.fromkeys((unit[0], unit[-1]))) for unit in units]


def outer_units(units: Sequence[Sequence[nn.Module]]) -> list[frozenset[int]]:
    """Return for each unit the numbers of the units around its first module, which run while it does."""
    within = [{inner for module in modules for inner in module.modules()} for modules in units]
    return [
        frozenset(other for other, inside in enumerate(within) if other != number and modules[0] in inside)
        for number, modules in enumerate(units)
    ]


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def places(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, UnitPlace]:
    """Where each parameter of a module belongs."""
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
    """The unit of each parameter and buffer: the innermost that holds it, or the root where several units share it."""
    numbers = {id(module): number for number, modules in enumerate(units) for module in modules}
    found: dict[torch.Tensor, int] = {}

    def visit(module: nn.Module, number: int) -> None:
        number = numbers.get(id(module), number)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found[tensor] = number if found.get(tensor, number) == number else 0
        for child in module.children():
            visit(child, number)

    visit(root, 0)
    return found


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All names of the parameters of a module, and behind them those of its buffers, with the tensors."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
