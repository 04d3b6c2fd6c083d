"""`checkpoint_layers`: hooks on the layers of a model, so that they keep less for backward and compute it again."""

from typing import Any, TypeVar

from torch import nn

from ._layers import LayersOf, choose_layers
from ._policies import Layers, Ops, Policy, checked
from ._to_host import ToHost
from ._torch_private import is_compiled
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
    """Lets the layers of a model keep less for backward, and compute the rest again.

    Modules, parameters, names and state dict stay what they are: there are hooks on the layers, and on those of their
    modules that are dropped. Losses and gradients are the same, bit for bit, where operations are deterministic.

    "cheap", Drop and Keep need to know what a layer saves. They look at the first forward of each layer, which keeps
    the inputs of layers alone, or, with an `example`, at one on fake tensors now. Inputs of another kind, such as a
    model in another mode, are looked at alike when they first come.

    Args:
        model: The model. Call this before `par_zero.shard` and other wrappers; torch.compile is not for such models.
        policy: What is kept. None: everything; without `to_host` nothing is changed. "cheap": all but what modules
            without a product make, such as norms and activation functions. "layers": the inputs of layers alone, as
            `Layers()`. `Layers(every=2)`: of every second layer. `Drop(which)`: all but what these modules make.
            `Keep("6GB")`: as much as a budget allows. `Ops(save)`: the inputs of layers, and some operations' results.
        layers: Which modules are layers. "auto": the items of every ModuleList, ModuleDict and Sequential that have
            modules and parameters of their own, but no items of items. Or a function that is True of a layer, or the
            layers. They may not lie within each other.
        example: What the model is called with, to look at its layers now: a tuple of positional arguments, a dict of
            keyword arguments, or one argument. The sizes, dtypes and devices of its tensors count, no element is read.
            "layers", Layers and Ops need none.
        to_host: Lets what is kept wait in host memory; None: it stays where it is. Under Ops the inputs of layers do,
            and results of operations stay.

    Returns:
        The model.

    Raises:
        TypeError: `layers` is neither a word, nor a function, nor modules, or `to_host` is no ToHost.
        ValueError: The policy or `layers` is none of these; there is no layer; a layer is compiled or drops activations
            already; or, with an example, the budget is too small or no module can be called again. The model is
            what it was. Without an example the last two come in the second forward.
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
            raise ValueError(f"layer {name!r} is compiled; call checkpoint_layers before torch.compile")
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
    """Runs the model once on fake tensors, and decides what is dropped."""
    args = example if isinstance(example, tuple) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    planner.fake = True
    try:
        on_fakes(model, model, args, kwargs)
    finally:
        planner.fake = False
    planner.plan()
