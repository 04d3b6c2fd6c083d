"""The optimizer on flat slices: how it comes to hold them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..layout.chunk import Chunk, Slice
from ..layout.packing import SliceRange


def rewire_(
    optimizer: Optimizer,
    chunks: Sequence[Chunk],
    first: int = 0,
    wholes: Sequence[tuple[int, nn.Parameter]] = (),
    cuts: Mapping[Chunk, Sequence[SliceRange] | None] | None = None,
) -> None:
    """Replaces the parameters in each param group by flat slices; group dicts and all their other entries stay.

    Args:
        optimizer: An optimizer that has not stepped; state that its constructor has made is cut like the parameters.
        chunks: The chunks that hold its parameters; they are given their slices.
        first: Number of its first param group among those of all optimizers.
        wholes: What this rank steps of assembled parameters: the number of its param group, and the tensor.
        cuts: Into which ranges a chunk is cut; None: one for each param group.
    """
    by_group: dict[int, list[nn.Parameter]] = defaultdict(list)
    whole_of: dict[nn.Parameter, nn.Parameter | None] = {}
    made = dict(optimizer.state)
    optimizer.state.clear()
    for chunk in chunks:
        chunk.slices = [] if chunk.assembled else list(_slices(chunk, (cuts or {}).get(chunk)))
        for part in chunk.slices:
            by_group[part.group].append(part.tensor)
            if chunk.layout.atomic:
                whole_of[part.tensor] = next(
                    member.parameter
                    for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True)
                    if (start, stop) == (part.start, part.stop)
                )
            state = _cut_state(made, chunk, part)
            if state:
                optimizer.state[part.tensor] = state
        for member in chunk.members:
            made.pop(member.parameter, None)  # whose memory is given back before there is more
    for number, tensor in wholes:
        by_group[number].append(tensor)
    for number, group in enumerate(optimizer.param_groups):
        order = {parameter: place for place, parameter in enumerate(group["params"])}
        held = by_group[first + number]
        # Whole tensors stay in the user's order, by which an optimizer may draw numbers, or add up a norm.
        group["params"] = sorted(held, key=lambda tensor: order.get(whole_of.get(tensor), -1))
        group.pop("param_names", None)  # these were of the parameters; the records of the slices have the names


def _slices(chunk: Chunk, ranges: Sequence[SliceRange] | None) -> Iterator[Slice]:
    """One tensor for each range: one for each param group, or, where parameters are kept whole, for each parameter."""
    low, high = chunk.updated
    shapes = {slot: member.shape for slot, member in zip(chunk.layout.slots, chunk.members, strict=True)}
    for part in chunk.layout.slices(low, high) if ranges is None else ranges:
        tensor = chunk.held(part.start, part.stop)
        if chunk.layout.atomic:  # optimizers that are not element-wise look at the shape
            tensor = tensor.view(shapes[part.start, part.stop])
        yield Slice(
            tensor=nn.Parameter(tensor), group=part.group, start=part.start, tier=part.tier, in_pieces=part.in_pieces
        )


def is_per_element(name: str, value: object, shape: torch.Size) -> bool:
    """Whether an entry of an optimizer's state has a number for each element of a parameter of that shape."""
    return name != "step" and isinstance(value, torch.Tensor) and value.shape == shape


def _cut_state(made: Mapping[Any, Mapping[str, Any]], chunk: Chunk, part: Slice) -> dict[str, Any]:
    """State of one slice, cut out of what an optimizer's constructor has made for the parameters."""
    state: dict[str, Any] = {}
    for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
        low, high = max(start, part.start), min(stop, part.stop)
        if low >= high:
            continue
        for name, value in made.get(member.parameter, {}).items():
            if not is_per_element(name, value, member.shape):
                if name not in state:  # a parameter may be cut, and each part counts for itself
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if name not in state:
                state[name] = torch.zeros(part.tensor.shape, dtype=value.dtype, device=part.tensor.device)
            state[name].view(-1)[low - part.start : high - part.start] = value.reshape(-1)[low - start : high - start]
    return state
