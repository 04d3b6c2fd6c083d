"""Separate steps for parameters of a flat slice that were not stepped equally often.

An optimizer keeps some state for a tensor as a unit: Adam counts its steps, and NAdam keeps a product as well. On one
device an optimizer skips a parameter without a gradient, and its count stays. The parameters of a slice can therefore
have different counts. Parameters with equal counts are then stepped together, as temporary tensors without the
parameters that have no gradient. In this example a block has 6 elements:

    slice      a a a a a b  b b b b c c  c c c c c c  c c d d d d
    steps      a 7, b 5, c 7, d none in this step

    stepped                              c c c c c c                   in place

               a a a a a .  . . . . c c               c c . . . .      copies of blocks, as one tensor

               . . . . . b  b b b b . .                                the same for b

Full blocks are stepped, although some elements of a copy are ignored. Vectorized kernels then take the same steps as in
a slice that is one tensor, so the results have the same bits however slices are split. Between steps the slice is one
tensor again, and its state stores the differing values under `par_groups.SCALARS`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import (
    SCALARS,
    Segment,
    Segments,
    Sharding,
    cut,
    is_per_element,
    on_settle,
    segments_of,
    set_segments,
)

from ..layout.chunk import Chunk, Slice
from ..layout.packing import ALIGNMENT

State = dict[str, Any]

Elements = tuple[int, int]
"""First element of a range, and the last plus one."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpan:
    """Elements of a parameter in a slice, with the padding behind them.

    Args:
        name: Name of the parameter.
        start: First element.
        stop: Last element plus one.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class SteppedElements:
    """Elements of a slice that are one tensor for the time of a step.

    Args:
        blocks: Ranges of the tensor's elements: one range that is stepped in place, or ranges that are copied.
        counted: Part of each range whose results are used.
        segments: Sharding metadata of the tensor.
        in_place: Whether the tensor is a view of the slice instead of a copy.
    """

    blocks: Sequence[Elements]
    counted: Sequence[Elements]
    segments: Segments
    in_place: bool

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Take these elements of a tensor that is as large as the slice: as a view or a copy."""
        ranges = [flat.view(-1)[start:stop] for start, stop in self.blocks]
        return ranges[0] if self.in_place else torch.cat(ranges)

    def put_back_(self, values: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the used results back to their positions."""
        end = 0
        for (first, last), (start, stop) in zip(self.blocks, self.counted, strict=True):
            place, value = flat[start:stop], values[end + start - first : end + stop - first]
            # A tensor that was stepped in place is a view of the slice already.
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
            end += last - first


def pieces_of(spans: Sequence[ParameterSpan], segments: Segments) -> list[SteppedElements]:
    """Return the tensors as which parameters are stepped together. Pure arithmetic.

    Args:
        spans: Parameters, in the order of the slice.
        segments: Sharding metadata of the slice.
    """
    runs: list[list[ParameterSpan]] = []
    for span in spans:
        if runs and runs[-1][-1].stop == span.start:
            runs[-1].append(span)
        else:
            runs.append([span])
    pieces: list[SteppedElements] = []
    edges: list[tuple[Elements, Sequence[ParameterSpan]]] = []
    for run in runs:
        start, stop = run[0].start, run[-1].stop
        first, last = -(-start // ALIGNMENT) * ALIGNMENT, stop // ALIGNMENT * ALIGNMENT
        # Full blocks inside of a run need no copy. Only the blocks at its two ends contain elements of other
        # parameters.
        if first < last:
            inside = [(first, last)]
            packed = _packed(inside, inside, [run], segments)
            pieces.append(SteppedElements(blocks=inside, counted=inside, segments=packed, in_place=True))
        around = [(start, first), (last, stop)] if first <= last else [(start, stop)]
        edges += [((low, high), run) for low, high in around if low < high]
    if edges:
        counted = [edge for edge, _ in edges]
        blocks = [(low // ALIGNMENT * ALIGNMENT, -(-high // ALIGNMENT) * ALIGNMENT) for low, high in counted]
        packed = _packed(blocks, counted, [run for _, run in edges], segments)
        pieces.append(SteppedElements(blocks=blocks, counted=counted, segments=packed, in_place=False))
    return pieces


def _packed(
    blocks: Sequence[Elements], counted: Sequence[Elements], runs: Sequence[Sequence[ParameterSpan]], segments: Segments
) -> Segments:
    """Return the sharding metadata of a tensor of some ranges of a slice.

    Args:
        blocks: Ranges.
        counted: Part of each range whose results are used.
        runs: Parameters that have elements in each range.
        segments: Sharding metadata of the slice.
    """
    found: dict[str, Sharding] = {}
    end = 0
    for (first, last), (start, stop), run in zip(blocks, counted, runs, strict=True):
        for span in run:
            low, high = max(start, span.start), min(stop, span.stop)
            if low < high:
                part = cut(segments[span.name], low, high, offset=end + low - first)
                before = found[span.name].boxes if span.name in found else ()
                found[span.name] = Sharding(part.shape, before + part.boxes)
        end += last - first
    return Segments(Segment(name, sharding) for name, sharding in found.items() if sharding.boxes)


@dataclass(eq=False, kw_only=True)
class SteppedTensor:
    """Tensor that is stepped in place of elements of a slice.

    Args:
        tensor: Tensor, with a gradient.
        piece: Elements of the slice.
        state: State of the tensor. The step changes it, or makes it if it is empty.
    """

    tensor: nn.Parameter
    piece: SteppedElements
    state: State


@dataclass(frozen=True, kw_only=True)
class SteppedGroup:
    """Parameters of a slice that are stepped together.

    Args:
        names: Names of the parameters.
        parts: Tensors that are stepped in their place.
        is_new: Whether the optimizer has stepped none of them before.
    """

    names: Sequence[str]
    parts: Sequence[SteppedTensor]
    is_new: bool


class SplitSlice:
    """Slice that is split for a step.

    Args:
        tensor: Slice.
        gradient: Gradient of the slice.
        state: State of the slice, which is changed in place when the slice is joined.
        scalars: State that the optimizer keeps per parameter instead of per element, by name. None: no state exists
            yet.
        groups: Parameters that are stepped together, and the elements as which they are stepped.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        scalars: Mapping[str, State | None],
        groups: Sequence[tuple[Sequence[ParameterSpan], Sequence[SteppedElements]]],
    ) -> None:
        self.state = state
        self._shape, self._flat, self._gradient = tensor.shape, tensor.detach().view(-1), gradient.view(-1)
        self._scalars = dict(scalars)
        self._groups = []
        for spans, pieces in groups:
            kept = self._scalars[spans[0].name]
            parts = [self._part(piece, kept) for piece in pieces]
            self._groups.append(SteppedGroup(names=[span.name for span in spans], parts=parts, is_new=kept is None))

    def _part(self, piece: SteppedElements, scalars: State | None) -> SteppedTensor:
        part = SteppedTensor(tensor=nn.Parameter(piece.of(self._flat)), piece=piece, state={})
        part.tensor.grad = piece.of(self._gradient)
        set_segments(part.tensor, piece.segments)
        if scalars is not None:
            of_elements = {
                name: value for name, value in self.state.items() if is_per_element(name, value, self._shape)
            }
            part.state |= {name: piece.of(value) for name, value in of_elements.items()}
            part.state |= {
                # Each tensor is stepped separately and changes its count, so each gets a copy.
                name: value.clone() if isinstance(value, torch.Tensor) else deepcopy(value)
                for name, value in scalars.items()
            }
        return part

    @property
    def parts(self) -> Iterator[SteppedTensor]:
        """Tensors that are stepped in place of the slice."""
        for group in self._groups:
            yield from group.parts

    @property
    def has_new(self) -> bool:
        """Whether the optimizer makes state for any parameter of the slice."""
        return any(group.is_new for group in self._groups)

    def join_(self, *, skipped: bool = False) -> None:
        """Join values and state after the step.

        Args:
            skipped: Whether the optimizer's kernels have skipped the step, so that state made in it must be dropped.
        """
        self.show_gradients()
        for group in self._groups:
            made: State | None = None
            for part in group.parts:
                part.piece.put_back_(part.tensor.detach(), self._flat)
                if not part.state or (skipped and group.is_new):
                    continue
                made = {}
                for name, value in part.state.items():
                    if is_per_element(name, value, part.tensor.shape):
                        part.piece.put_back_(value, self._slot(name, value))
                    else:
                        made[name] = value
            if made is not None:
                self._scalars.update(dict.fromkeys(group.names, made))
                # The values of one group stand for all: torch looks for these keys when it loads a state.
                self.state |= made
        if len({kind_of(scalars) for scalars in self._scalars.values()}) > 1:
            self.state[SCALARS] = {name: scalars for name, scalars in self._scalars.items() if scalars is not None}
        else:  # the values of all parameters are equal again
            self.state.pop(SCALARS, None)

    def show_gradients(self) -> None:
        """Copy the gradients of copies, which a step may have changed, to the gradient of the slice."""
        for part in self.parts:
            if part.tensor.grad is not None:
                part.piece.put_back_(part.tensor.grad, self._gradient)

    def _slot(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Get a flat slot of the slice's state: new, with zeros, or in a wider dtype if a part of it has that dtype."""
        found = self.state.get(name)
        if found is None:
            found = torch.zeros(self._shape, dtype=like.dtype, device=like.device)
        slot: torch.Tensor = found.to(torch.promote_types(found.dtype, like.dtype))
        self.state[name] = slot
        return slot.view(-1)


def kind_of(scalars: State | None) -> object:
    """Return a key that is equal for parameters that may be stepped together. Waits for no device.

    Args:
        scalars: State that an optimizer keeps per parameter instead of per element. None: there is no state.
    """
    if scalars is None:
        return None
    return tuple((name, _value_of(scalars[name])) for name in sorted(scalars))


def _value_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        # Reading a number on an accelerator would wait for the device. Parameters whose state is one object there are
        # equal anyway.
        return value.item() if value.is_cpu and value.dim() == 0 else id(value)
    return value if isinstance(value, bool | int | float | complex | str | None) else id(value)


class SliceSplitter:
    """Splitter of an optimizer's slices, which skips parameters that had no gradient on any rank.

    AdamW would move such parameters if their gradient were zero.

    Args:
        optimizer: Optimizer.
        chunks: Chunks whose slices it holds.
    """

    def __init__(self, optimizer: Optimizer, chunks: Sequence[Chunk]) -> None:
        self._optimizer, self._chunks = optimizer, tuple(chunks)
        self._spans: dict[
            torch.Tensor, tuple[Sequence[ParameterSpan], set[str]]
        ] = {}  # by slice: its parameters, and the names without gradients
        self._pieces: dict[torch.Tensor, tuple[object, list[list[SteppedElements]]]] = {}  # of the latest step
        self._taken: dict[torch.Tensor, SplitSlice] = {}  # slices whose parts the optimizer holds now
        self._lists: list[tuple[dict[str, Any], list[torch.Tensor]]] = []  # param groups with their original tensors
        self._forget: Callable[[], None] = lambda: None  # ends the registration that calls `leave` for readers

    def look(self, unused: Sequence[Sequence[int]]) -> None:
        """Find the slices to split in the step that begins, and drop the gradients of slices that are skipped.

        Args:
            unused: Members of each chunk that had no gradient.
        """
        self._spans = {}
        for chunk, members in zip(self._chunks, unused, strict=True):
            idle = {chunk.members[member].names[0] for member in members}
            for part in chunk.slices:
                parted = SCALARS in self._optimizer.state.get(part.tensor, ())
                if part.tensor.grad is None or not (idle or parted):
                    continue
                spans = _spans(chunk, part)
                # The optimizer itself skips a slice without a gradient, so such a slice is not split.
                if all(span.name in idle for span in spans):
                    part.tensor.grad = None
                elif parted or any(span.name in idle for span in spans):
                    self._spans[part.tensor] = spans, idle

    def take(self, tensor: torch.Tensor, gradient: torch.Tensor, state: State) -> SplitSlice | None:
        """Split a slice for the step that has begun. Return None if the slice is stepped as one tensor.

        Args:
            tensor: Slice.
            gradient: Gradient of the slice.
            state: State of the slice.
        """
        if tensor not in self._spans:
            return None
        spans, idle = self._spans[tensor]
        parted = state.get(SCALARS)
        alike = {name: value for name, value in state.items() if not is_per_element(name, value, tensor.shape)}
        scalars: dict[str, State | None] = {
            span.name: parted.get(span.name) if parted is not None else alike if state else None for span in spans
        }
        groups: dict[object, list[ParameterSpan]] = {}
        for span in spans:
            if span.name not in idle:
                groups.setdefault(kind_of(scalars[span.name]), []).append(span)
        way = [[span.name for span in group] for group in groups.values()]
        # Steps mostly split a slice in the same way as the step before, so the pieces are kept.
        if self._pieces.get(tensor, (None,))[0] != way:
            segments = segments_of(tensor)
            self._pieces[tensor] = way, [pieces_of(group, segments) for group in groups.values()]
        pieces = self._pieces[tensor][1]
        return SplitSlice(tensor, gradient, state, scalars, list(zip(groups.values(), pieces, strict=True)))

    def enter(self) -> None:
        """Replace slices by their parts in the optimizer, until `join_` or `leave`."""
        # Entering the contexts for nothing would take time, and most steps split nothing.
        if not self._spans and not isinstance(self._optimizer, torch.optim.SGD):
            return
        # Tensors that are made in inference mode have no version counter.
        with torch.inference_mode(mode=False), torch.no_grad():
            for group in self._optimizer.param_groups if self._spans else ():
                held: list[torch.Tensor] = []
                for tensor in group["params"]:
                    state = self._optimizer.state.get(tensor, {})
                    taken = None if tensor.grad is None else self.take(tensor, tensor.grad, state)
                    if taken is None:
                        held.append(tensor)
                        continue
                    self._taken[tensor] = taken
                    for part in taken.parts:
                        held.append(part.tensor)
                        if part.state:
                            self._optimizer.state[part.tensor] = part.state
                self._lists.append((group, group["params"]))
                group["params"] = held
            if self._taken:
                parts = [part.tensor for taken in self._taken.values() for part in taken.parts]
                # A hook may read the optimizer's tensors before the step ends, and must then find slices.
                self._forget = on_settle(parts, self.leave).remove
            if isinstance(self._optimizer, torch.optim.SGD):
                self._begin_momentum()

    def _begin_momentum(self) -> None:
        """Make momentum for tensors that torch's fused SGD steps for the first time, together with older tensors.

        The fused kernel takes all tensors in one call, and fails if some have momentum and some have none. Zeros give
        the same result, unless gradients are dampened: torch does not dampen the first gradient.

        Raises:
            ValueError: `dampening` is not 0.
        """
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            if not (group.get("fused") and group["momentum"]):
                continue
            stepped = [tensor for tensor in group["params"] if tensor.grad is not None]
            new = [tensor for tensor in stepped if state.get(tensor, {}).get("momentum_buffer") is None]
            if not new or len(new) == len(stepped):
                continue
            if group["dampening"]:
                names = [name for tensor in new for name in segments_of(tensor).names]
                # A program may catch the error, and must then find slices in the optimizer.
                self.leave()
                raise ValueError(
                    f"{names[0]!r} has its first gradient after others had theirs, and fused=True with dampening="
                    f"{group['dampening']} cannot begin its momentum; give SGD fused=False, or no dampening"
                )
            state.update({tensor: {"momentum_buffer": torch.zeros_like(tensor)} for tensor in new})

    def join_(self) -> None:
        """Join the slices after the optimizer's step, and put them back into the optimizer."""
        if not self._taken and not self._lists:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            skipped = False
            if any(taken.has_new for taken in self._taken.values()):
                found_inf = getattr(self._optimizer, "found_inf", None)  # of torch's GradScaler, for kernels that skip
                # A kernel that skipped its step still made state, which must not count: nothing was stepped.
                skipped = found_inf is not None and bool(found_inf)
            for tensor, taken in self._taken.items():
                for part in taken.parts:
                    part.state = self._optimizer.state.get(part.tensor, {})
                taken.join_(skipped=skipped)
                if taken.state:
                    self._optimizer.state[tensor] = taken.state
            self.leave()

    def leave(self, *_: object) -> None:
        """Put the slices back into the optimizer, unchanged if it has not stepped."""
        # A step calls this several times, and entering `no_grad` for nothing would take time.
        if not self._taken and not self._lists:
            return
        with torch.no_grad():
            for taken in self._taken.values():
                taken.show_gradients()
                for part in taken.parts:
                    self._optimizer.state.pop(part.tensor, None)
                    part.tensor.grad = None
            for group, tensors in self._lists:
                group["params"] = tensors
            self._forget()
            self._taken.clear()
            self._lists.clear()


def _spans(chunk: Chunk, part: Slice) -> list[ParameterSpan]:
    """Return the parameters of a slice, in its order."""
    inside = sorted(
        (max(start, part.start), number)
        for number, (start, stop) in enumerate(chunk.layout.slots)
        if max(start, part.start) < min(stop, part.stop)
    )
    starts = [start - part.start for start, _ in inside]
    stops = [*starts[1:], part.tensor.numel()]
    return [
        ParameterSpan(name=chunk.members[number].names[0], start=start, stop=stop)
        for (_, number), start, stop in zip(inside, starts, stops, strict=True)
    ]
