"""Which modules are called by themselves, and which form a unit: the grain of gathering at stage 3."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

Units = str | Callable[[nn.Module], bool] | Sequence[nn.Module]
"""How to choose them."""


class Place(NamedTuple):
    """Where a parameter belongs. What belongs elsewhere is packed elsewhere.

    Args:
        unit: Its number.
        items: The numbers of the called modules that have it.
    """

    unit: int
    items: tuple[int, ...]


def called(module: nn.Module) -> list[nn.Module]:
    """What is called of a module: itself, or, of a ModuleList or ModuleDict without a forward, its items."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return [module]
    return list(dict.fromkeys(each for child in module.children() for each in called(child)))


def choose_units(root: nn.Module, units: Units, bucket: int) -> list[list[nn.Module]]:
    """What is gathered at a time: the root for what is in no other, then lists of modules that run one after the other.

    Args:
        root: The whole module.
        units: "auto": the items of every ModuleList, ModuleDict and Sequential that have parameters, but no items of
            items, unless these are all that is called; neighbours together until they have `bucket` bytes. Or a
            function that says it of a module, or the modules themselves; each is then a unit.
        bucket: Bytes.

    Raises:
        TypeError: What is neither a word, nor a function, nor modules.
        ValueError: A word that is not "auto", or a module that is not in the root.
    """
    if isinstance(units, str):
        if units != "auto":
            raise ValueError(f"units is {units!r}; give 'auto', a function of a module, or a list of modules")
        return [[root], *_automatic(root, bucket)]
    if callable(units):
        chosen = [each for each in root.modules() if units(each)]
    elif not isinstance(units, Iterable):
        raise TypeError(f"units is {units!r}; give 'auto', a function of a module, or a list of modules")
    else:
        known = {id(each) for each in root.modules()}
        chosen = list(units)
        for each in chosen:
            if id(each) not in known:
                raise ValueError(
                    f"units has a {type(each).__name__} that is not in the module; give modules of its own"
                )
    return [[root], *([each] for each in chosen if each is not root)]


def _automatic(root: nn.Module, bucket: int) -> Iterator[list[nn.Module]]:
    """The units within each module that is called, and, unless it is the root, the module for the rest."""
    apart = called(root)
    for module in apart:
        if module is not root and _has_parameters(module):
            yield [module]
        yield from _joined(_items(module, apart), bucket)


def _joined(modules: Iterable[nn.Module], bucket: int) -> Iterator[list[nn.Module]]:
    current: list[nn.Module] = []
    size = 0
    for module in modules:
        own = sum(each.numel() * each.element_size() for each in module.parameters())
        if current and size + own > bucket:
            yield current
            current, size = [], 0
        current.append(module)
        size += own
    if current:
        yield current


def _items(module: nn.Module, apart: Sequence[nn.Module]) -> Iterable[nn.Module]:
    for child in module.children():
        if any(child is each for each in apart):
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and _has_parameters(child):
            yield child
        else:
            yield from _items(child, apart)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def places(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, Place]:
    """Where each parameter of a module belongs."""
    items: dict[nn.Parameter, tuple[int, ...]] = {}
    for number, module in enumerate(called(root)):
        for parameter in module.parameters():
            items[parameter] = (*items.get(parameter, ()), number)
    return {parameter: Place(unit, items[parameter]) for parameter, unit in owners(root, units).items()}


def owners(root: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[nn.Parameter, int]:
    """The unit of each parameter: the innermost that holds it, or the root where several units share it."""
    numbers = {id(module): number for number, each in enumerate(units) for module in each}
    found: dict[nn.Parameter, int] = {}

    def visit(module: nn.Module, number: int) -> None:
        number = numbers.get(id(module), number)
        for parameter in module.parameters(recurse=False):
            found[parameter] = number if found.get(parameter, number) == number else 0
        for child in module.children():
            visit(child, number)

    visit(root, 0)
    return found
