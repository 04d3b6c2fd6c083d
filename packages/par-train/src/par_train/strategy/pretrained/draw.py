"""Weights by seed and name, the same under every topology: each module's are drawn whole, and this rank's part is kept.

transformers draws a model by calling `_init_weights` with each of its modules. Here it draws one module at a time, of a
twin that has no memory otherwise, so that a rank holds its own part and one module's whole weights.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from par_data import derive_seed
from par_groups import sharding_of

from ..._torch_private import version_of


def fill_part_(parameter: nn.Parameter, whole: Tensor, device: torch.device) -> None:
    """Gives a parameter on the meta device this rank's part of a whole tensor; it stays the same object.

    Args:
        parameter: The parameter, whose record says what its part is.
        whole: The whole tensor.
        device: Where the parameter is to lie.
    """
    part = torch.zeros(parameter.shape, dtype=whole.dtype)  # padding stays zero
    for box in sharding_of(parameter).boxes:
        box.of(part).copy_(whole[box.slices])
    made = nn.Parameter(part.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)


@torch.no_grad()
def draw_(part: nn.Module, twin: nn.Module, seed: int, device: torch.device) -> None:
    """Draws all weights of a model that has no adapters, as transformers would, and computes its buffers.

    Each module's own weights are a function of the seed and the module's name. Linears inside adapters count by the
    name that they have without these.

    Args:
        part: What this rank has of the model, on the meta device.
        twin: The whole model, uncut, on the meta device.
        seed: The seed of the run.
        device: Where the weights are to lie.

    Raises:
        ValueError: A tensor that transformers does not draw.
    """
    modules, parameters = dict(part.named_modules()), dict(part.named_parameters())
    for path, module in twin.named_modules():
        inside = f"{path}.base_layer" if f"{path}.base_layer" in modules else path
        prefix = f"{inside}." if inside else ""
        own = {key: parameters[prefix + key] for key in module._parameters if prefix + key in parameters}
        buffers = modules[inside]._buffers if inside in modules else {}
        buffers = {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        if not own and not buffers:
            continue
        drawn = _drawn(twin, path, module, derive_seed(seed, path))
        for key in (*own, *buffers):
            if version_of(drawn[key]) == 0:
                raise ValueError(
                    f"{prefix + key!r} is drawn by nobody: neither {type(twin).__name__}._init_weights nor a "
                    f"reset_parameters of its {type(module).__name__} writes to it; give a folder with weights"
                )
        for key, parameter in own.items():
            fill_part_(parameter, drawn[key].detach(), device)
        for key, buffer in buffers.items():
            torch.utils.swap_tensors(buffer, drawn[key].to(device))


def draw_adapter_(part: nn.Parameter, name: str, seed: int, device: torch.device, *, gaussian: bool) -> None:
    """Draws this rank's part of the matrix A of an adapter, as peft does; a function of the seed and the name.

    Args:
        part: The matrix [rank, features], or this rank's part of it.
        name: Its name in peft's files.
        seed: The seed of the run.
        device: Where it is to lie.
        gaussian: Whether it is normal, with a deviation of 1 / rank; else it is uniform, as torch draws a linear.
    """
    whole = torch.empty(sharding_of(part).shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    if gaussian:
        nn.init.normal_(whole, std=1 / len(whole), generator=generator)
    else:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    fill_part_(part, whole, device)


def _drawn(twin: nn.Module, path: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """The parameters and buffers that a module holds itself, whole, on the CPU, as transformers draws them, in fp32.

    The modules around it are asked too: some draw the last linear of theirs anew. All else is on the meta device, where
    nothing is drawn.
    """
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for key, parameter in parameters.items():
        if parameter is not None:
            module._parameters[key] = nn.Parameter(torch.zeros(parameter.shape))
    for key, buffer in buffers.items():
        if buffer is not None:
            module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    try:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            for maker, around in _from_inside(twin, path):
                maker._init_weights(around)  # type: ignore[operator]  # a method of transformers' models
        both = {**module._parameters, **module._buffers}
        return {key: tensor for key, tensor in both.items() if tensor is not None}
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _from_inside(twin: nn.Module, path: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """A module and those around it, from the inside, each with the innermost model of transformers that it lies in."""
    chain = [twin]
    for name in path.split(".") if path else []:
        chain.append(chain[-1].get_submodule(name))
    makers = [module for module in chain if hasattr(module, "_init_weights")]
    for module in reversed(chain):
        yield makers[-1], module
        if module is makers[-1] and len(makers) > 1:
            makers.pop()
