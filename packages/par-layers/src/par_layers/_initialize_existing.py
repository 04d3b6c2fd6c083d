"""Initial weights of existing models, the same under every topology.

transformers draws a model by calling `_init_weights` with each of its modules. Here it draws one module at a time, of a
twin on the meta device, so that a rank holds its own part and the full weights of one module.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from par_groups import sharding_of

from ._initialize import seed_of
from ._torch_private import version_of


def fill_shard_(parameter: nn.Parameter, full: Tensor, device: torch.device | str) -> None:
    """Fill a parameter on the meta device with this rank's shard of a full tensor; it stays the same object.

    Args:
        parameter: The parameter, with its sharding metadata.
        full: The full tensor.
        device: Device of the filled parameter.
    """
    part = torch.zeros(parameter.shape, dtype=full.dtype)  # padding stays zero
    for box in sharding_of(parameter).boxes:
        box.of(part).copy_(full[box.slices])
    made = nn.Parameter(part.to(device, parameter.dtype), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)


@torch.no_grad()
def initialize_transformers_(part: nn.Module, twin: nn.Module, seed: int, device: torch.device | str) -> None:
    """Draw the weights of a Hugging Face Transformers model as transformers would, and compute its buffers, in place.

    The weights of each module depend only on the seed and the name of the module, so that they are identical under
    every topology. A rank holds its shards and the full weights of one module at a time.

    Args:
        part: This rank's part of the model, on the meta device: sharded by `parallelize`, and perhaps a pipeline stage.
            Linears inside adapters of peft have the names of the model without adapters.
        twin: The full model, not sharded, on the meta device.
        seed: Seed of the weights.
        device: Device of the weights.

    Raises:
        ValueError: transformers does not draw a tensor.
    """
    modules, parameters = dict(part.named_modules()), dict(part.named_parameters())
    for path, module in twin.named_modules():
        # PEFT moves an adapted module to `base_layer`, where the twin without adapters has the module itself.
        inside = f"{path}.base_layer" if f"{path}.base_layer" in modules else path
        prefix = f"{inside}." if inside else ""
        own = {key: parameters[prefix + key] for key in module._parameters if prefix + key in parameters}
        buffers = modules[inside]._buffers if inside in modules else {}
        buffers = {key: buffer for key, buffer in buffers.items() if buffer is not None and buffer.is_meta}
        if not own and not buffers:
            continue
        drawn = _drawn(twin, path, module, seed_of(seed, path))
        for key in (*own, *buffers):
            # At version 0, nothing has written to the zeros that `_drawn` allocated.
            if version_of(drawn[key]) == 0:
                raise ValueError(
                    f"{prefix + key!r} is drawn by nobody: neither {type(twin).__name__}._init_weights nor a "
                    f"reset_parameters of its {type(module).__name__} writes to it; load the weights from files"
                )
        for key, parameter in own.items():
            fill_shard_(parameter, drawn[key].detach(), device)
        for key, buffer in buffers.items():
            torch.utils.swap_tensors(buffer, drawn[key].to(device))


def _drawn(twin: nn.Module, path: str, module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the module's own full parameters and buffers as transformers draws them, in fp32 on the CPU.

    The modules around it draw too, because some draw their last linear again. All other modules are on the meta device,
    where nothing is drawn.
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
            # First torch's own rule, as in the module's constructor, then the model's rule, which may override it.
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
    """Yield a module and the modules around it, inside out, each with the innermost Transformers model that has it."""
    chain = [twin]
    for name in path.split(".") if path else []:
        chain.append(chain[-1].get_submodule(name))
    makers = [module for module in chain if hasattr(module, "_init_weights")]
    for module in reversed(chain):
        yield makers[-1], module
        if module is makers[-1] and len(makers) > 1:
            makers.pop()
