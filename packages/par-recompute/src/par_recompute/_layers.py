"""Choice of the modules that count as layers. The policy decides for each layer what it saves and recomputes."""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

LayersOf = str | Callable[[nn.Module], bool] | Iterable[nn.Module]
"""Accepted forms of the `layers` argument: "auto", a function of a module, or the modules."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_layers(root: nn.Module, layers: LayersOf = "auto") -> dict[str, nn.Module]:
    """Return the layers by name, in the order of `named_modules`.

    Args:
        root: Model.
        layers: "auto" for the items of every ModuleList, ModuleDict and Sequential that have modules and parameters of
            their own, but no items of items; a function that returns True for a layer; or the layers.

    Raises:
        TypeError: `layers` is neither a word, nor a function, nor modules.
        ValueError: The model has no layer, a layer is not in the model or is nested in another layer, or a word is not
            "auto".
    """
    if isinstance(layers, str):
        if layers != "auto":
            raise ValueError(f"layers is {layers!r}; give 'auto', a function of a module, or a list of modules")
        chosen = list(dict.fromkeys(_items(root)))
    elif callable(layers):
        chosen = [module for module in root.modules() if layers(module)]
    elif not isinstance(layers, Iterable):
        raise TypeError(f"layers is {layers!r}; give 'auto', a function of a module, or a list of modules")
    else:
        chosen = list(dict.fromkeys(layers))
        for module in chosen:
            if not any(module is other for other in root.modules()):
                raise ValueError(
                    f"layers has a {type(module).__name__} that is not in the model; give modules of its own"
                )
    if not chosen:
        raise ValueError(
            f"layers is {layers!r}, and the {type(root).__name__} has no such module; give a list of the modules whose "
            "activations are to be dropped"
        )
    named = {name: module for name, module in root.named_modules() if any(module is each for each in chosen)}
    for name, module in named.items():
        for other, outside in named.items():
            if module is not outside and any(module is each for each in outside.modules()):
                raise ValueError(f"layer {name!r} lies within layer {other!r}; give one of them")
    return named


def _items(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost layers among the items of all containers within a module."""
    for child in module.children():
        # A list of modules is never called, so there is no forward to hook; its items may be layers.
        lists = isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward
        has_parts = any(True for _ in child.children()) and any(True for _ in child.parameters())
        if isinstance(module, _CONTAINERS) and has_parts and not lists:
            yield child
        else:
            yield from _items(child)
