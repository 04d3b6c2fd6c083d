"""Whether an optimizer may step flat shares: it is tried, because no optimizer says of itself how it works.

An optimizer that is to hold a flat share must treat each element by itself, as Adam does; one that looks at a tensor's
shape or norm (Muon, Adafactor, LARS) would do something else to a part of it. And from stage 1 on no rank has all
tensors, so it must treat each tensor by itself; one that divides by the norm of all gradients does not. A list of names
would not know the optimizers that users write. So an optimizer of the same class and settings makes three steps with
the same 39 numbers, given in three ways:

    as they are      one optimizer has two tensors, of 4 x 6 and 3 x 5 elements
    as one           one optimizer has one flat tensor of all 39         -> other numbers: it looks at whole tensors
    each alone       two optimizers have one of the two tensors each     -> other numbers: it looks at all tensors

Numbers are compared with a tolerance, since vector kernels round differently where a tensor ends.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .step import is_per_element
from .twin import twin_of

_STEPS = 3

Tensors = Sequence[torch.Tensor]


def looks_at_whole_tensors(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer treats an element by what else is in its tensor, or whether no step can be made to tell.

    Args:
        optimizer: The optimizer whose class is tried; it is not touched.
        group: The param group whose settings are tried.
    """
    with torch.random.fork_rng(devices=[]):  # an optimizer that draws numbers gets others each time, and is refused
        as_they_are = _stepped(optimizer, group, lambda tensors: [tensors])
        as_one = _stepped(optimizer, group, lambda tensors: [[torch.cat([tensor.flatten() for tensor in tensors])]])
    return as_they_are is None or as_one is None or not _alike(as_they_are, as_one)


def looks_at_all_tensors(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer treats a tensor by what is in the others.

    Args:
        optimizer: The optimizer whose class is tried; it is not touched.
        group: The param group whose settings are tried.
    """
    with torch.random.fork_rng(devices=[]):  # an optimizer that draws numbers gets the same ones both times
        torch.default_generator.manual_seed(0)
        as_they_are = _stepped(optimizer, group, lambda tensors: [tensors])
        torch.default_generator.manual_seed(0)
        each_alone = _stepped(optimizer, group, lambda tensors: [[tensor] for tensor in tensors])
    return as_they_are is not None and each_alone is not None and not _alike(as_they_are, each_alone)


def slots_of_steps(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The state that an optimizer keeps for each element of a tensor after a few steps: dtypes by name.

    Args:
        optimizer: The optimizer whose class is tried; it is not touched.
        group: The param group whose settings are tried.
        dtype: Dtype of the tensor.
    """
    parameter, state = _state_of_steps(optimizer, group, dtype)
    return {name: value.dtype for name, value in state.items() if is_per_element(name, value, parameter.shape)}


def count_bytes_of_steps(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Bytes of what an optimizer keeps for a tensor as a whole after a few steps, such as Adam's count of them.

    Args:
        optimizer: The optimizer whose class is tried; it is not touched.
        group: The param group whose settings are tried.
        dtype: Dtype of the tensor.
    """
    parameter, state = _state_of_steps(optimizer, group, dtype)
    return sum(
        value.nbytes
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not is_per_element(name, value, parameter.shape)
    )


def _state_of_steps(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> tuple[nn.Parameter, Mapping[str, Any]]:
    """A tensor after a few steps, and what the optimizer keeps for it."""
    with torch.random.fork_rng(devices=[]):
        parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
        twin = _twin(optimizer, group, [parameter])
        for _ in range(_STEPS):
            parameter.grad = torch.randn(3, 5, dtype=dtype)
            twin.step()
    return parameter, twin.state.get(parameter, {})


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], arrange: Callable[[Tensors], Sequence[Tensors]]
) -> torch.Tensor | None:
    """The 39 numbers after a few steps; None if the optimizer refuses a step.

    Args:
        optimizer: The optimizer whose class is tried.
        group: The param group whose settings are tried.
        arrange: Gives of the two tensors those of each optimizer that is to step.
    """
    generator = torch.Generator().manual_seed(0)

    def draw() -> Sequence[Tensors]:
        return arrange([torch.randn(4, 6, generator=generator), torch.randn(3, 5, generator=generator)])

    parameters = [[nn.Parameter(tensor) for tensor in tensors] for tensors in draw()]
    twins = [_twin(optimizer, group, own) for own in parameters]
    for _ in range(_STEPS):
        for own, gradients in zip(parameters, draw(), strict=True):
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
        try:
            for twin in twins:
                twin.step()
        except (TypeError, ValueError, RuntimeError, LookupError, AssertionError):
            return None  # it takes matrices alone, or needs more than gradients
    return torch.cat([parameter.detach().flatten() for own in parameters for parameter in own])


def _twin(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and settings, for other parameters and on the CPU."""
    settings = {name: _on_cpu(value) for name, value in group.items() if name not in ("params", "param_names")}
    if "lr" in settings and float(settings["lr"]) == 0:  # before a warm-up, in which nothing would move
        settings["lr"] = 1e-2
    if settings.get("capturable"):  # for GPUs alone, and another way to the same numbers
        settings |= {"capturable": False, "foreach": False}
    twin = twin_of(optimizer, {**settings, "params": parameters})
    for name, value in optimizer.__dict__.items():
        if isinstance(value, torch.Generator) and value.device.type == "cpu":
            twin.__dict__[name] = torch.Generator().set_state(value.get_state())
    for original in [parameter for parameter in group["params"] if parameter.numel()][:1]:
        for name, value in optimizer.state.get(original, {}).items():  # made by the constructor, as Adagrad's is
            for parameter in parameters:
                twin.state[parameter][name] = (
                    torch.full_like(parameter, value.flatten()[0].real.item())
                    if is_per_element(name, value, original.shape)
                    else _on_cpu(value)
                )
    return twin


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
