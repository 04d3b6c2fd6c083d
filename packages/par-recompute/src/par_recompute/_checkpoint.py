"""Activation checkpointing by hooks on a model's layers: `checkpoint_layers` saves less and recomputes the rest."""

from typing import Any, TypeVar

from torch import nn

from par_groups import is_compiled

from ._layers import LayersOf, choose_layers
from ._policies import Layers, Ops, Policy, checked
from ._to_host import ToHost
from .observe.measure import ATTRIBUTE, on_fakes
from .run.away import Away
from .run.layer import Enter, Layer, Leave
from .run.planner import Planner

Model = TypeVar("Model", bound=nn.Module)


def checkpoint_layers(
    model: Model,
    policy: Policy | None,
    *,
    layers: LayersOf = "auto",
    example: Any = None,
    to_host: ToHost | None = None,
) -> Model:
    """Install activation checkpointing on the layers of a model: save less for backward and recompute the rest.

    The function only adds hooks to the layers and to their dropped modules. Modules, parameters, names and the state
    dict stay unchanged. Losses and gradients are bitwise identical if all operations are deterministic.

    The policies "cheap", Drop and Keep need the list of tensors that each layer saves. They observe the first forward
    of each layer; in this forward, the layer saves only its inputs. With an `example`, they observe one forward on fake
    tensors now instead. They observe a new kind of call, such as a model in another mode, when it first happens.

    Args:
        model: Model. Call this function before `par_zero.shard` and other wrappers. torch.compile is not supported.
        policy: Activations to save. None: all of them; without `to_host` the model stays unchanged. "cheap": all but
            the outputs of modules without a matmul, such as norms and activation functions. "layers": only the inputs
            of layers, as `Layers()`. `Layers(every=2)`: the same for every second layer. `Drop(which)`: all but the
            outputs of the chosen modules. `Keep("6GB")`: as many as a budget allows. `Ops(save)`: the inputs of layers
            and the results of some operations.
        layers: Modules to treat as layers, or a function that returns True for a layer. "auto": the items of every
            ModuleList, ModuleDict and Sequential that have modules and parameters of their own, but no items of items.
            Layers must not be nested.
        example: Arguments for one forward on fake tensors: a tuple of positional arguments, a dict of keyword
            arguments, or one argument. Only the sizes, dtypes and devices of its tensors matter. "layers", Layers and
            Ops do not need it.
        to_host: Options for offloading saved activations to host memory; None: no offloading. Under Ops, the inputs of
            layers are offloaded, and the results of operations stay on the device.

    Returns:
        The same model.

    Raises:
        TypeError: `layers` is neither a word, nor a function, nor modules, or `to_host` is not a ToHost.
        ValueError: The policy or `layers` is not supported, the model has no layer, or a layer is compiled or drops
            activations already. With an example, also: the budget is too small, or no module can be called again. The
            model stays unchanged. Without an example, the second forward raises these two errors.
    """
    chosen = checked(policy)
    if to_host is not None and not isinstance(to_host, ToHost):
        raise TypeError(f"to_host is {to_host!r}; give a ToHost, such as ToHost(ahead=2), or None")
    if chosen is None and to_host is None:
        return model
    named = choose_layers(model, layers)
    for name, layer in named.items():
        parts = name.split(".")
        around: list[nn.Module] = [
            model,
            *(model.get_submodule(".".join(parts[:count])) for count in range(1, len(parts))),
        ]
        if any(is_compiled(module) for module in (*around, layer)):
            # The hooks of a layer run Python in the middle of its forward, so compiling it later raises an error, too.
            raise ValueError(
                f"layer {name!r} is compiled, and checkpoint_layers is for eager layers; remove torch.compile, or use "
                "torch.utils.checkpoint or torch's activation_memory_budget instead"
            )
        # The layer itself is asked first, because `layer.modules()` below would find it, too, and the error would be
        # another.
        if ATTRIBUTE in layer.__dict__:
            raise ValueError(f"layer {name!r} drops activations already; call checkpoint_layers once for each layer")
        if any(ATTRIBUTE in module.__dict__ for module in around if module is not layer):
            raise ValueError(f"layer {name!r} lies within a layer that drops activations already; give one of them")
        if any(ATTRIBUTE in module.__dict__ for module in layer.modules()):
            raise ValueError(f"layer {name!r} has a layer in it that drops activations already; give one of them")
    planner = Planner(chosen, named)
    away = None if to_host is None else Away(to_host)
    hooked = [Layer(known, planner, away) for known in planner.layers]
    for each in hooked:
        each.known.module.__dict__[ATTRIBUTE] = each
    handles = [
        model.register_forward_pre_hook(Enter(planner), prepend=True),
        model.register_forward_hook(Leave(planner), always_call=True),
    ]
    if example is not None and not isinstance(chosen, Layers | Ops | None):
        try:
            _look(model, planner, example)
        # The caller may go on with the model and another policy, so nothing of this call may stay on it.
        except BaseException:
            for handle in handles:
                handle.remove()
            for each in hooked:
                each.remove()
                del each.known.module.__dict__[ATTRIBUTE]
            raise
        for each in hooked:
            each.forget()
    return model


def _look(model: nn.Module, planner: Planner, example: Any) -> None:
    """Run the model once on fake tensors, and plan which modules are dropped."""
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    planner.fake = True
    try:
        on_fakes(model, model, args, kwargs)
    finally:
        planner.fake = False
    planner.plan()
