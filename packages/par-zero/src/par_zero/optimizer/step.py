"""Replacement of an optimizer's parameters by flat slices of chunks."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import is_per_element

from ..layout.chunk import Chunk, Slice
from ..layout.packing import SliceRange


def rewire_(
    optimizer: Optimizer,
    chunks: Sequence[Chunk],
    first: int = 0,
    wholes: Sequence[tuple[int, nn.Parameter]] = (),
    cuts: Mapping[Chunk, Sequence[SliceRange] | None] | None = None,
) -> None:
    """Replace the parameters in each param group by flat slices. The group dicts and all other entries stay.

    Args:
        optimizer: Optimizer that has not stepped. State that its constructor has made is sliced like the parameters.
        chunks: Chunks that hold its parameters; they get their slices.
        first: Number of its first param group among those of all optimizers.
        wholes: Assembled tensors that this rank steps, each with the number of its param group.
        cuts: Ranges into which each chunk is split; None: one range for each param group.
    """
    by_group: dict[int, list[nn.Parameter]] = defaultdict(list)
    whole_of: dict[nn.Parameter, nn.Parameter | None] = {}
    made = dict(optimizer.state)
    # The slices replace the parameters as keys. Entries of parameters would never be freed.
    optimizer.state.clear()
    for chunk in chunks:
        chunk.slices = [] if chunk.plan.assembled else list(_slices(chunk, (cuts or {}).get(chunk)))
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
            # The state of a chunk's parameters is freed before the slices of the next chunk allocate memory.
            made.pop(member.parameter, None)
    for number, tensor in wholes:
        by_group[number].append(tensor)
    for number, group in enumerate(optimizer.param_groups):
        order = {parameter: place for place, parameter in enumerate(group["params"])}
        # Full tensors stay in the user's order, because an optimizer may draw numbers or add up a norm in this order.
        group["params"] = sorted(by_group[first + number], key=lambda tensor: order.get(whole_of.get(tensor), -1))
        # These names described parameters. The sharding metadata of the slices contains the names now.
        group.pop("param_names", None)


def _slices(chunk: Chunk, ranges: Sequence[SliceRange] | None) -> Iterator[Slice]:
    """Yield one tensor for each range: for each param group, or, if the optimizer is atomic, for each parameter."""
    low, high = chunk.updated
    shapes = {slot: member.shape for slot, member in zip(chunk.layout.slots, chunk.members, strict=True)}
    for part in chunk.layout.slices(low, high) if ranges is None else ranges:
        tensor = chunk.held(part.start, part.stop)
        # An optimizer that is not elementwise may read the shape.
        if chunk.layout.atomic:
            tensor = tensor.view(shapes[part.start, part.stop])
        yield Slice(
            tensor=nn.Parameter(tensor), group=part.group, start=part.start, tier=part.tier, in_pieces=part.in_pieces
        )


def _cut_state(made: Mapping[Any, Mapping[str, Any]], chunk: Chunk, part: Slice) -> dict[str, Any]:
    """Return the state of a slice, taken from the state that an optimizer's constructor made for the parameters."""
    state: dict[str, Any] = {}
    for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
        low, high = max(start, part.start), min(stop, part.stop)
        if low >= high:
            continue
        for name, value in made.get(member.parameter, {}).items():
            if not is_per_element(name, value, member.shape):
                # Each slice of a parameter counts separately, so each gets a copy.
                if name not in state:
                    state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if name not in state:
                state[name] = torch.zeros(part.tensor.shape, dtype=value.dtype, device=part.tensor.device)
            state[name].view(-1)[low - part.start : high - part.start] = value.reshape(-1)[low - start : high - start]
    return state
