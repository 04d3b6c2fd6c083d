"""The optimizer on flat slices: how it comes to hold them, and what stays as it is in its step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..layout.chunk import Chunk, Slice
from ..layout.packing import Range


def rewire_(
    optimizer: Optimizer,
    chunks: Sequence[Chunk],
    first: int = 0,
    wholes: Sequence[tuple[int, nn.Parameter]] = (),
    cuts: Mapping[Chunk, Sequence[Range] | None] | None = None,
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
    made = dict(optimizer.state)
    optimizer.state.clear()
    for chunk in chunks:
        chunk.slices = [] if chunk.assembled else list(_slices(chunk, (cuts or {}).get(chunk)))
        for part in chunk.slices:
            by_group[part.group].append(part.tensor)
            state = _cut_state(made, chunk, part)
            if state:
                optimizer.state[part.tensor] = state
        for member in chunk.members:
            made.pop(member.parameter, None)  # whose memory is given back before there is more
    for number, tensor in wholes:
        by_group[number].append(tensor)
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = by_group[first + number]
        group.pop("param_names", None)  # these were of the parameters; the records of the slices have the names


def _slices(chunk: Chunk, ranges: Sequence[Range] | None) -> Iterator[Slice]:
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


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether an optimizer has not stepped. Some make their state before, such as Adagrad, with a `step` of 0."""
    return all(
        isinstance(state, Mapping) and (not state or ("step" in state and float(state["step"]) == 0))
        for state in optimizer.state.values()
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


class Unmoved:
    """Keeps parameters as they are that had no gradient on any rank: a gradient of zero would let AdamW move them.

    Where nothing in a slice had a gradient, the optimizer passes over the slice, so that its count of steps stays too.
    That must be alike at every stage, though slices are cut elsewhere; so it is done for called modules that were not
    used at all, which have slices of their own, and for whole parameters. Others are put back after the step.

    Args:
        optimizer: The optimizer that steps.
        chunks: The chunks whose slices it holds.
        unused: For each chunk, the members that had no gradient.
    """

    def __init__(self, optimizer: Optimizer, chunks: Sequence[Chunk], unused: Sequence[Sequence[int]]) -> None:
        self._optimizer = optimizer
        self._still: dict[torch.Tensor, list[tuple[int, int]]] = {}  # by slice: from where to where nothing moves
        self._kept: list[Kept] = []
        used = {chunk.items for chunk, members in zip(chunks, unused, strict=True) if len(members) < len(chunk.members)}
        for chunk, members in zip(chunks, unused, strict=True):
            for start, stop in (chunk.layout.slots[member] for member in members):
                for part in chunk.slices:
                    low, high = max(part.start, start) - part.start, min(part.stop, stop) - part.start
                    if low >= high:
                        continue
                    if chunk.layout.atomic or chunk.items not in used:
                        part.tensor.grad = None
                        continue
                    self._still.setdefault(part.tensor, []).append((low, high))
                    if not part.in_pieces:
                        state = optimizer.state.get(part.tensor, {})
                        self._kept.append(Kept(part.tensor, state, [(low, high)]))

    def kept(self, tensor: torch.Tensor, state: Mapping[str, Any]) -> "Kept | None":
        """Notes what must not move of a slice that is stepped through buffers, when it is about to be stepped.

        Args:
            tensor: The slice.
            state: Its state, as it was read.
        """
        still = self._still.get(tensor)
        return None if still is None else Kept(tensor, state, still)

    def restore_(self) -> None:
        """Puts values and state back after the step."""
        for kept in self._kept:
            kept.restore_(self._optimizer.state.get(kept.tensor, {}))


class Kept:
    """Values and state of a part of a slice, to be put back after a step.

    Args:
        tensor: The slice.
        state: Its state before the step.
        ranges: From where to where nothing is to move.
    """

    def __init__(self, tensor: torch.Tensor, state: Mapping[str, Any], ranges: Sequence[tuple[int, int]]) -> None:
        self.tensor = tensor
        flat, slots = tensor.detach().view(-1), self._slots(state)
        self._kept = [
            (low, high, flat[low:high].clone(), {name: slot.view(-1)[low:high].clone() for name, slot in slots.items()})
            for low, high in ranges
        ]

    def restore_(self, state: Mapping[str, Any]) -> None:
        """Puts values and state back; state that the step has made becomes zero.

        Args:
            state: The state of the slice after the step.
        """
        for low, high, value, slots in self._kept:
            self.tensor.detach().view(-1)[low:high] = value
            for name, slot in self._slots(state).items():
                slot.view(-1)[low:high] = slots.get(name, 0)

    def _slots(self, state: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """The state that has a number for each element."""
        return {
            name: slot
            for name, slot in state.items()
            if isinstance(slot, torch.Tensor) and slot.shape == self.tensor.shape
        }
