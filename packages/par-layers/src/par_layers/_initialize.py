"""Fills parameters, the same in every mode."""

import hashlib

import torch
from torch import nn

from par_groups import sharding_of

from .layers.parallel_layer import HasInit, check_records


def initialize(
    model: nn.Module,
    seed: int | None,
    prefix: str = "",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fills the parameters of our layers, the same in every mode and on any number of ranks.

    Each parameter has a generator of its own, seeded by (seed, name). The whole tensor is drawn on the CPU in fp32, and
    this rank's part is kept: one parameter at a time, so that a model larger than one rank's memory can be built.
    Parameters keep their identity.

    Args:
        model: A model with layers of ours; other parameters are left alone.
        seed: The seed of the run; None draws nothing and leaves zeros, for weights that are loaded next.
        prefix: What the whole model has before the names, where `model` is a part of it such as a pipeline stage.
        device: The device of the filled parameters; default: where they are, or the CPU if that is the meta device.
        dtype: The dtype of the filled parameters; default: fp32.

    Raises:
        ValueError: A parameter is on the meta device but not ours, and so has no init rule.
        RuntimeError: A parameter of our layers was replaced, as by FSDP2, and so has lost its init rule.
    """
    check_records(model, "par_init")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, HasInit):
            if parameter.is_meta:
                raise ValueError(f"parameter {name!r} is on the meta device and has no init rule; materialise it first")
            continue
        sharding = sharding_of(parameter)
        local = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")  # padding stays zero
        if seed is not None:
            whole = torch.empty(sharding.shape, dtype=torch.float32, device="cpu")
            generator = torch.Generator(device="cpu").manual_seed(_seed_of(seed, prefix + name))
            parameter.par_init(whole, generator)
            for box in sharding.boxes:
                box.of(local).copy_(whole[box.slices])
        place = device or ("cpu" if parameter.is_meta else parameter.device)
        filled = nn.Parameter(local.to(device=place, dtype=dtype), requires_grad=parameter.requires_grad)
        filled.__dict__.update(parameter.__dict__)  # the record, and what others know of it
        torch.utils.swap_tensors(parameter, filled)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
