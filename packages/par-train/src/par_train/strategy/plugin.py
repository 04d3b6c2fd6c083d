"""Plugins: the steps by which a strategy makes a model, its optimizer and its data loader parallel."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

from torch import nn
from torch.optim import Optimizer

from par_groups import Registry


class Plugin:
    """One step of `Strategy.initialize`. A subclass overrides the methods for the objects that it changes.

    A plugin with the name of a built-in one ("tensor", "pipeline", "device", "recompute", "tied", "zero", "precision")
    replaces it. Other plugins run after "device", when modules may still be replaced, unless they require a later one.

    Attributes:
        name: Name of the plugin, unique in a strategy.
        requires: Names of plugins that must exist, and are applied before this one.
        conflicts: Names of plugins that must not exist.
        supported_devices: Device types, such as "cuda"; None for all.
        supported_precisions: Names of precisions; None for all.
        controls_precision: Whether this plugin applies the precision, so that the built-in "precision" is omitted.
        controls_device: Whether this plugin moves tensors, so that the built-in "device" is omitted.
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

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Any) -> nn.Module:
        """Change a model.

        Args:
            model: A model, or an nn.ModuleList of several models that share an optimizer.
            optimizer: The optimizer of the model's parameters; None without one.
            strategy: The `par_train.Strategy`, with its groups, layers and options.

        Returns:
            The model for the next plugin, which may be the same object.
        """
        del optimizer, strategy
        return model

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, strategy: Any) -> Optimizer:
        """Change an optimizer, after its model.

        Args:
            optimizer: The optimizer that the plugin before this one has returned.
            model: The model that `setup_model` has returned.
            strategy: The `par_train.Strategy`.

        Returns:
            The optimizer for the next plugin, which may be the same object.
        """
        del model, strategy
        return optimizer

    def setup_dataloader(self, dataloader: Any, strategy: Any) -> Any:
        """Change a data loader.

        Args:
            dataloader: The data loader, which returns only this rank's batches.
            strategy: The `par_train.Strategy`.

        Returns:
            The data loader for the next plugin, which may be the same object.
        """
        del strategy
        return dataloader


PLUGINS: Registry[type[Plugin]] = Registry("plugin", "par_train.plugins")


def find_plugin(given: Plugin | str) -> Plugin:
    """Return the plugin that an entry of a config names.

    Args:
        given: A plugin, the name under which an installed package declares one, or "module:Class".

    Raises:
        ValueError: No package declares this name, or the module cannot be imported.
        TypeError: The object is no plugin.
    """
    if isinstance(given, str) and ":" in given:
        try:
            given = EntryPoint(name=given, value=given, group="").load()()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"plugin {given!r} cannot be imported: {error}; give 'module:Class'") from None
    elif isinstance(given, str):
        if not PLUGINS.names():
            raise ValueError(f"no plugin is called {given!r}; known: none; give 'module:Class'")
        given = PLUGINS[given]()
    if not isinstance(given, Plugin):
        raise TypeError(f"a plugin is a {type(given).__name__}; give an instance of a subclass of par_train.Plugin")
    if not given.name:
        raise ValueError(f"the plugin {type(given).__name__} has no name; give it one, it is what others refer to")
    return given


def in_order(built_in: Sequence[Plugin], plugins: Sequence[Plugin]) -> list[Plugin]:
    """Return all plugins in the order in which they are applied.

    Args:
        built_in: The built-in plugins that the options need, in their order.
        plugins: The plugins of the user.

    Raises:
        ValueError: Two plugins have one name or conflict, or a required plugin is missing, or plugins require each
            other.
    """
    names = [plugin.name for plugin in plugins]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"there are {names.count(name)} plugins called {name!r}; give one")
    # A plugin takes the place of the built-in one with its name, and of those whose work it controls.
    replaced = {*names}
    replaced |= {"precision"} if any(plugin.controls_precision for plugin in plugins) else set()
    replaced |= {"device"} if any(plugin.controls_device for plugin in plugins) else set()
    kept = [plugin for plugin in built_in if plugin.name not in replaced]
    # The user's plugins come where the model is sharded and on its device, and before hooks and flat buffers hold
    # modules.
    early = [plugin for plugin in kept if plugin.name in ("tensor", "pipeline", "device")]
    waiting = [*early, *plugins, *(plugin for plugin in kept if plugin not in early)]
    present = {plugin.name for plugin in waiting}
    for plugin in waiting:
        for other in present.intersection(plugin.conflicts):
            raise ValueError(f"the plugins {plugin.name!r} and {other!r} conflict, says {plugin.name!r}; give one")
        for other in set(plugin.requires) - present:
            raise ValueError(f"plugin {plugin.name!r} requires {other!r}, which is not there; add it to plugins")
    ordered: list[Plugin] = []
    while waiting:
        done = {plugin.name for plugin in ordered}
        # The first one that lacks nothing: the order above holds wherever requirements leave a choice.
        ready = next((plugin for plugin in waiting if done.issuperset(plugin.requires)), None)
        if ready is None:
            raise ValueError(f"the plugins {[plugin.name for plugin in waiting]} require each other; break the circle")
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def check_support(plugins: Sequence[Plugin], device: str, precision: str) -> None:
    """Raise ValueError if a plugin does not support the device type or the precision."""
    for each in plugins:
        for what, value, known in (
            ("device", device, each.supported_devices),
            ("precision", precision, each.supported_precisions),
        ):
            if known is not None and value not in known:
                raise ValueError(f"plugin {each.name!r} does not support {what} {value!r}; it supports {list(known)}")
