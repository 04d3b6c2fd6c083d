"""Call of a layer on fake tensors. They have shapes, dtypes and devices but no elements, so nothing is computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._torch_private import FakeTensorMode, tree_map
from ..plan.table import Table
from .observer import looking_on

ATTRIBUTE = "par_recompute_layer"
"""Key in `module.__dict__` under which a layer's module stores its `Layer` object."""


def measure(layer: nn.Module, *args: Any, **kwargs: Any) -> Table:
    """Return a table of the tensors that one call of a layer saves, and of the modules that can be recomputed.

    The layer runs its forward once on fake tensors: it computes no element, draws no random number and takes no memory.
    It uses the layer's mode (training or not) and the autocast around the call as they are.

    Args:
        layer: Layer. The `requires_grad` of its parameters determines which tensors are saved.
        *args: Positional arguments of the call. Kernels save different tensors on different devices, so put the tensors
            on the device of the real call.
        **kwargs: Keyword arguments of the call.

    Returns:
        The table. Its candidates take one tensor and return one tensor. They draw no random numbers, call no
        collective, write into no tensor, and read only their input, parameters and buffers. The observer sees the
        collectives that torch dispatches, such as gloo's and NCCL's. It cannot see collectives of process groups
        written in Python.

    Raises:
        ValueError: The layer drops activations already.
        Exception: The layer reads elements of a fake tensor, for example by `item()`, and torch raises an error such as
            DataDependentOutputException. checkpoint_layers without `example` observes a real call instead.
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
    """Call a function with fake copies of its arguments, while the module's parameters and buffers are fake.

    Args:
        module: Module.
        run: Function that calls the module.
        args: Positional arguments of `run`; tensors are replaced by fakes, other values are passed unchanged.
        kwargs: Keyword arguments of `run`, with tensors replaced in the same way.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # A tied weight, or an input given twice, stays one storage, so that its bytes count once.
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
    """Module with a given function as its forward, so that torch can swap the parameters of the module inside."""

    def __init__(self, module: nn.Module, run: Callable[..., object]) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self._run = (run,)  # which may be the module: not a second child

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Run the function."""
        self._run[0](*args, **kwargs)
