"""Fills parameters, the same in every mode."""

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from par_groups import Sharding, original_name, sharding_of

from ._random_bits import random_bits
from .experts.router import Router
from .layers.parallel_layer import HasInit, check_records
from .layers.parameter import ByPlace, EachExpert, Init, half_normal


def initialize(
    model: nn.Module,
    seed: int | None,
    prefix: str = "",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill the parameters of par-layers' layers with the same values in every mode and on any number of ranks.

    Each element depends only on the seed, the parameter's name and the element's index in the full tensor. Each rank
    therefore draws only its own shard, on the CPU in fp32, and the full model may be larger than one rank's memory.

    An init rule of your own is a function that fills full tensors. For such a rule, each rank draws one full parameter
    at a time, from a generator that is seeded by (seed, name), and keeps its shard. For packed experts, each rank draws
    one of its experts at a time, from a generator that is seeded by (seed, name, expert). The parameters stay the same
    Python objects.

    Args:
        model: A model with layers of par-layers. Other parameters stay unchanged.
        seed: The seed of the run. None: parameters are filled with zeros, for weights that you load afterwards.
        prefix: Prefix of the parameter names in the full model, such as "blocks.0.", if `model` is only a part of it: a
            pipeline stage, or the unit that par-zero passes to `ParameterInit(init_fn=...)`.
        device: The device of the filled parameters. Default: their current device, or the CPU for the meta device.
        dtype: The dtype of the filled parameters. Default: fp32.

    Raises:
        ValueError: A parameter on the meta device has no init rule, because it is not from par-layers.
        RuntimeError: A parameter of par-layers was replaced, as by FSDP2, and so has lost its init rule.
    """
    check_records(model, "par_init")
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.name = prefix + original_name(name)
    for given, parameter in model.named_parameters():
        name = original_name(given)  # the same weights, whether or not torch.compile wraps a module
        if not isinstance(parameter, HasInit):
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {prefix + name!r} is on the meta device and has no init rule; materialise it first"
                )
            continue
        sharding = sharding_of(parameter)
        local = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")  # padding stays zero
        if seed is not None:
            _draw(local, sharding, parameter.par_init, seed_of(seed, prefix + name))
        place = device or ("cpu" if parameter.is_meta else parameter.device)
        filled = nn.Parameter(local.to(device=place, dtype=dtype), requires_grad=parameter.requires_grad)
        filled.__dict__.update(parameter.__dict__)  # the record, and what others know of it
        # The swap keeps the Python object, which tied modules and optimizers may hold.
        torch.utils.swap_tensors(parameter, filled)
    half_normal.cache_clear()


_BLOCK = 1 << 17
"""Number of elements that are drawn at a time: few enough to stay in a core's cache."""


def _draw(local: Tensor, sharding: Sharding, init: Init, seed: int) -> None:
    """Fill the boxes of a local tensor."""
    if isinstance(init, ByPlace):
        room = torch.empty(4, _BLOCK, dtype=torch.int32, device="cpu")
        for box in sharding.boxes:
            _draw_box(box.of(local), box.start, sharding.shape, init, seed, room)
        return
    if isinstance(init, EachExpert):
        here = {expert for box in sharding.boxes for expert in range(box.start[0], box.start[0] + box.size[0])}
        one = torch.empty(sharding.shape[1:], dtype=torch.float32, device="cpu")
        for expert in sorted(here):
            init.init(one, torch.Generator(device="cpu").manual_seed(seed_of(seed, str(expert))))
            for box in sharding.boxes:
                if box.start[0] <= expert < box.start[0] + box.size[0]:
                    box.of(local)[expert - box.start[0]].copy_(one[box.slices[1:]])
        return
    whole = torch.empty(sharding.shape, dtype=torch.float32, device="cpu")
    init(whole, torch.Generator(device="cpu").manual_seed(seed))
    for box in sharding.boxes:
        box.of(local).copy_(whole[box.slices])


def _draw_box(view: Tensor, start: Sequence[int], shape: Sequence[int], init: ByPlace, seed: int, room: Tensor) -> None:
    """Fill a box, block by block. An element's row is its place on dim 0, its column the place on all other dims.

    A tensor of one dim or none is a single row.

    Args:
        view: The box in the local tensor.
        start: The first global index on each dim.
        shape: The shape of the whole tensor.
        init: The init rule.
        seed: Seed of this tensor.
        room: Room for four blocks.
    """
    if view.dim() < 2:
        view, start, shape = view.reshape(1, -1), (0, *(start or (0,))), (1, *(shape or (1,)))
    columns = torch.zeros((), dtype=torch.int64, device="cpu")
    for first, size, length in zip(start[1:], view.shape[1:], shape[1:], strict=True):
        columns = columns.unsqueeze(-1) * length + torch.arange(first, first + size, device="cpu")
    columns = columns.flatten()
    # A block is several full rows, or a part of a single one.
    wide = min(len(columns), _BLOCK)
    high = max(_BLOCK // wide, 1)
    for top in range(0, len(view), high):
        rows = torch.arange(start[0] + top, start[0] + min(top + high, len(view)), device="cpu").unsqueeze(1)
        block = view[top : top + high].flatten(1)
        for left in range(0, len(columns), wide):
            part, numbers = block[:, left : left + wide], columns[left : left + wide]
            init.fill(part, rows, partial(_bits, rows, numbers, seed, room))
        rows_here = view[top : top + high]
        if block.data_ptr() != rows_here.data_ptr():  # flattening has copied
            rows_here.copy_(block.view(rows_here.shape))


def _bits(rows: Tensor, columns: Tensor, seed: int, room: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random bits for every pair of a row and a column, and buffers for three tensors of that shape."""
    drawn, *rest = room[:, : rows.numel() * columns.numel()].view(4, rows.numel(), columns.numel())
    random_bits(rows, columns, seed, (drawn, rest[0]))
    return drawn, rest[0], rest[1], rest[2]


def seed_of(seed: int, name: str) -> int:
    """Hash a seed and a name to a seed of 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]) >> 1
