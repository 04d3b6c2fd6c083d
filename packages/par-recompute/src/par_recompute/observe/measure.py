"""A call of a layer on fake tensors, which have shapes, dtypes and devices but no elements: nothing is computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._torch_private import FakeTensorMode, tree_map
from ..plan.table import Table
from .observer import looking_on

ATTRIBUTE = "par_recompute_layer"
"""Where a layer's module has what drops its activations."""


def measure(layer: nn.Module, *args: Any, **kwargs: Any) -> Table:
    """What one call of a layer saves for its backward, and which modules could make it again.

    The layer runs once, forward, on fake tensors: no element is computed, no random number drawn, no memory taken. The
    layer, its mode (training or not) and the autocast around the call are what they are.

    Args:
        layer: The layer. Its parameters decide with `requires_grad` what is saved.
        *args: What the layer is called with. Kernels save different tensors on different devices, so its tensors must
            be on the device that is meant.
        **kwargs: The same, by keyword.

    Returns:
        The table. Its candidates take one tensor and give one, draw no random numbers, call no collective, write into
        nothing, and read nothing but their input, parameters and buffers. Collectives are seen where torch dispatches
        them, as those of gloo and NCCL, and not those of process groups that are written in Python.

    Raises:
        ValueError: The layer drops activations already.
        Exception: Whatever the layer raises on tensors whose elements it cannot read, such as torch's
            DataDependentOutputException of `item()`. checkpoint_layers without `example` measures a real call instead.
    """
    for name, module in layer.named_modules():
        if ATTRIBUTE in module.__dict__:
            raise ValueError(
                f"module {name!r} drops activations, so what it saves is not what it would save; measure before "
                "checkpoint_layers, or print saved(model)"
            )
    tables: list[Table] = []

    def run(*given: Any, **named: Any) -> None:
        with looking_on(layer, (given, named), fake=True) as seen:
            layer(*given, **named)
        tables.extend(seen)

    on_fakes(layer, run, args, kwargs)
    return tables[0]


def on_fakes(module: nn.Module, run: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Calls a function with fake copies of these arguments, while the module's parameters and buffers are fakes.

    Args:
        module: The module.
        run: Calls it.
        args: Positional arguments; what is no tensor stays what it is.
        kwargs: Keyword arguments, alike.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in fakes:
            leaf = value if value.is_leaf else value.detach().requires_grad_()
            fakes[id(value)] = mode.from_tensor(leaf)
        return fakes[id(value)]

    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    swapped = {f"module.{name}": fake(tensor) for name, tensor in tensors}
    given, named = tree_map(fake, (tuple(args), dict(kwargs)))
    with mode, torch.enable_grad():
        functional_call(_Runs(module, run), swapped, given, named)


class _Runs(nn.Module):
    """Runs a function as its forward, so that torch swaps the parameters of a module below it meanwhile."""

    def __init__(self, module: nn.Module, run: Callable[..., object]) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self._run = (run,)  # which may be the module: not a second child

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Runs the function."""
        self._run[0](*args, **kwargs)
