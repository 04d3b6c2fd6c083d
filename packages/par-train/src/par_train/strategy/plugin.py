"""A plugin: one thing that is done to a model, its optimizer or its data loader on the way to parallel training."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from par_groups import Registry

if TYPE_CHECKING:
    from .strategy import Strategy


class Plugin:
    """One step of wiring; a subclass overrides what it has something to do for.

    A plugin with the name of a built-in one ("pipeline", "device", "tied", "zero", "precision") takes its place. Others
    come after "device", where modules may still be replaced, unless they require one of the later ones.

    Attributes:
        name: Unique in a strategy.
        requires: Names of plugins that must be there, and are applied before this one.
        conflicts: Names of plugins that must not be there.
        supported_devices: Device types, such as "cuda"; None: all.
        supported_precisions: Names of precisions; None: all.
        controls_precision: It takes care of precision, so the built-in "precision" is left out.
        controls_device: It takes care of where tensors lie, so the built-in "device" is left out.
        supports_no_sync: Whether gradients may be accumulated under `Strategy.no_sync`.
    """

    name: str = ""
    requires: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    supported_devices: Sequence[str] | None = None
    supported_precisions: Sequence[str] | None = None
    controls_precision: bool = False
    controls_device: bool = False
    supports_no_sync: bool = True

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: "Strategy") -> nn.Module:
        """Called with each model; gives the model that goes on, which may be the same.

        Args:
            model: A model, or an nn.ModuleList of several that share an optimizer.
            optimizer: Of its parameters, if it has one.
            strategy: Its groups, layers and options can be asked.
        """
        del optimizer, strategy
        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, strategy: "Strategy") -> Optimizer:
        """Called with each optimizer, after its model; gives the optimizer that goes on."""
        del model, strategy
        return optimizer

    def setup_dataloader(self, dataloader: Any, strategy: "Strategy") -> Any:
        """Called with each data loader, which gives this rank's batches already."""
        del strategy
        return dataloader


PLUGINS: Registry[type[Plugin]] = Registry("plugin", "par_train.plugins")


def find_plugin(given: "Plugin | str") -> Plugin:
    """A plugin from what a config can say: a name that a wheel declares, or "module:Class".

    Raises:
        ValueError: Nobody provides it.
        TypeError: It is no plugin.
    """
    if isinstance(given, str):
        if ":" not in given and not PLUGINS.names():
            raise ValueError(f"no plugin is called {given!r}; known: none; give 'module:Class'")
        given = _imported(given)() if ":" in given else PLUGINS[given]()
    if not isinstance(given, Plugin):
        raise TypeError(f"a plugin is a {type(given).__name__}; give an instance of a subclass of par_train.Plugin")
    if not given.name:
        raise ValueError(f"the plugin {type(given).__name__} has no name; give it one, it is what others refer to")
    return given


def in_order(built_in: Sequence[Plugin], plugins: Sequence[Plugin]) -> list[Plugin]:
    """All plugins in the order in which they are applied.

    Args:
        built_in: "pipeline", "device", "tied", "zero", "precision", or those of them that are wanted.
        plugins: The user's.

    Raises:
        ValueError: Two of one name, a conflict, a requirement that is not there or that goes round in circles.
    """
    names = [each.name for each in plugins]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"there are {names.count(name)} plugins called {name!r}; give one")
    kept = [each for each in built_in if each.name not in names and not _controlled(each, plugins)]
    early = [each for each in kept if each.name in ("pipeline", "device")]
    waiting = [*early, *plugins, *(each for each in kept if each not in early)]
    _check(waiting)
    ordered: list[Plugin] = []
    while waiting:
        done = {each.name for each in ordered}
        ready = next((each for each in waiting if done.issuperset(each.requires)), None)
        if ready is None:
            raise ValueError(f"the plugins {[each.name for each in waiting]} require each other; break the circle")
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def check_support(plugins: Sequence[Plugin], device: str, precision: str) -> None:
    """Raises ValueError if a plugin supports something else."""
    for each in plugins:
        for what, value, known in (
            ("device", device, each.supported_devices),
            ("precision", precision, each.supported_precisions),
        ):
            if known is not None and value not in known:
                raise ValueError(f"plugin {each.name!r} does not support {what} {value!r}; it supports {list(known)}")


def _check(plugins: Sequence[Plugin]) -> None:
    names = {each.name for each in plugins}
    for each in plugins:
        for other in each.conflicts:
            if other in names:
                raise ValueError(f"the plugins {each.name!r} and {other!r} conflict, says {each.name!r}; give one")
        for other in each.requires:
            if other not in names:
                raise ValueError(f"plugin {each.name!r} requires {other!r}, which is not there; add it to plugins")


def _controlled(built_in: Plugin, plugins: Sequence[Plugin]) -> bool:
    if built_in.name == "precision":
        return any(each.controls_precision for each in plugins)
    return built_in.name == "device" and any(each.controls_device for each in plugins)


def _imported(path: str) -> Any:
    try:
        return EntryPoint(name=path, value=path, group="").load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"plugin {path!r} cannot be imported: {error}; give 'module:Class'") from None
