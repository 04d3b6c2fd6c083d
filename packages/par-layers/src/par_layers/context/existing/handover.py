"""Hand-over of states from each rank of a sequence to the next, and of their gradients back.

Forward: rank r sends its states to rank r + 1 after its tokens. Backward: rank r + 1 sends the gradients of these
states to rank r, which continues from them. Each direction is one message, of the same size for any length of the
sequence.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import sendable

from ..._torch_private import group_of_name
from .states import StateKey, States

HEADER = 64
"""Numbers of the message that describes the states of a layer, int64. It is sent once for each layer."""

KINDS = ("conv", "recurrent", "linear")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

RowShapes = dict[StateKey, tuple[tuple[int, ...], torch.dtype]]
"""Shapes of the states of a row, without the batch, and their dtypes."""

CallDtypes = tuple[torch.dtype, torch.dtype | None]
"""Dtypes of a layer's input and of autocast. If they change, as from training to validation, states change theirs."""


@dataclass
class StateLink:
    """Connection of one layer to the same layer on the neighbouring ranks of the sequence.

    Args:
        group: Name of the group of the sequence; "" for one rank.
        rank: Index of this rank in the group.
        shapes: Shapes of the states of the rank on the left, by the dtypes of a call.
        described: Dtypes of calls whose states were described to the rank on the right.
    """

    group: str
    rank: int
    shapes: dict[CallDtypes, RowShapes] = field(default_factory=dict)
    described: set[CallDtypes] = field(default_factory=set)

    def receive(self, x: Tensor, *, with_gradient: bool) -> tuple[Tensor, States]:
        """Receive the states of the rank on the left; backward: send their gradients to it.

        Args:
            x: Input of the layer, [B, s, h]. It passes through, so that backward sends before it goes to earlier
                layers.
            with_gradient: Whether backward will run, identical on all ranks.
        """
        dtypes = _dtypes(x)
        # Only a forward shows the shapes of states, so the left rank describes them in a message before the first one.
        if dtypes not in self.shapes:
            self.shapes[dtypes] = _receive_header(self, x.device)
        shapes = self.shapes[dtypes]
        # Without an input that requires a gradient, autograd would not call this backward, and the left rank would
        # wait.
        anchor = torch.zeros((), device=x.device, requires_grad=with_gradient)
        passed, *states = _ReceiveStates.apply(x, anchor, self, shapes)  # type: ignore[no-untyped-call]
        return passed, dict(zip(shapes, states, strict=True))

    def send(self, x: Tensor, out: Tensor, states: States, *, with_gradient: bool) -> Tensor:
        """Send states to the rank on the right; backward: receive their gradients from it.

        Args:
            x: Input of the layer, [B, s, h].
            out: Output of the layer, [B, s, h]. It passes through, so that backward begins with the message.
            states: States after the tokens of this rank.
            with_gradient: Whether backward will run, identical on all ranks.

        Raises:
            ValueError: A state has a dtype that is not floating.
        """
        dtypes = _dtypes(x)
        if dtypes not in self.described:
            _send_header(states, self)
            self.described.add(dtypes)
        anchor = torch.zeros((), device=out.device, requires_grad=with_gradient)
        result: Tensor = _SendStates.apply(out, anchor, self, *states.values())  # type: ignore[no-untyped-call]
        return result


class _ReceiveStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, link: StateLink, shapes: RowShapes) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.save_for_backward(anchor)
        like = [((x.shape[0], *shape), dtype) for shape, dtype in shapes.values()]
        ctx.like = like
        return (x.view_as(x), *_unpacked(_get(_size(like), link.rank - 1, link, x.device), like))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor | None, *of_states: Tensor | None) -> tuple[Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        # The left rank waits for a message of a fixed size, so a state that nobody used has zeros in it.
        gradients = [
            torch.zeros(shape, dtype=dtype, device=anchor.device) if each is None else each
            for each, (shape, dtype) in zip(of_states, ctx.like, strict=True)
        ]
        _put(_packed(gradients), ctx.link.rank - 1, ctx.link)
        return of_x, torch.zeros_like(anchor), None, None


class _SendStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, link: StateLink, *states: Tensor) -> Tensor:
        ctx.link = link
        ctx.like = [(tuple(state.shape), state.dtype) for state in states]
        # Checkpointing stops a recomputation after the last saved tensor. As this one is the last of the layer, the
        # message to the right is sent in a recomputation, too.
        ctx.save_for_backward(anchor)
        _put(_packed(states), link.rank + 1, link)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        message = _get(_size(ctx.like), ctx.link.rank + 1, ctx.link, anchor.device)
        return of_out, torch.zeros_like(anchor), None, *_unpacked(message, ctx.like)


Like = list[tuple[tuple[int, ...], torch.dtype]]


def _size(like: Like) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in like)


def _packed(states: Any) -> Tensor:
    """Return states as the bytes of one message."""
    return torch.cat([state.detach().contiguous().flatten().view(torch.uint8) for state in states])


def _unpacked(message: Tensor, like: Like) -> list[Tensor]:
    """Return the states in a message, each in its own memory."""
    parts = message.split([math.prod(shape) * dtype.itemsize for shape, dtype in like])
    # A copy begins at an aligned address, which another dtype needs.
    return [part.clone().view(dtype).view(shape) for part, (shape, dtype) in zip(parts, like, strict=True)]


def _put(message: Tensor, peer: int, link: StateLink) -> None:
    group = group_of_name(link.group)
    dist.send(sendable(message, group), group=group, group_dst=peer)


def _get(size: int, peer: int, link: StateLink, device: torch.device) -> Tensor:
    group = group_of_name(link.group)
    message = torch.empty(size, dtype=torch.uint8, device=sendable(torch.empty(0, device=device), group).device)
    dist.recv(message, group=group, group_src=peer)
    return message.to(device)


def _send_header(states: States, link: StateLink) -> None:
    numbers: list[int] = [len(states)]
    for (kind, index), state in states.items():
        if state.dtype not in DTYPES:
            raise ValueError(
                f"a recurrent layer has a state of {state.dtype}; a state that ranks pass on must be floating: use the "
                "ranks of 'sequence' for data, tensor or pipeline"
            )
        numbers += [KINDS.index(kind), index, DTYPES.index(state.dtype), state.dim() - 1, *state.shape[1:]]
    header = torch.zeros(HEADER, dtype=torch.int64, device=next(iter(states.values())).device)
    header[: len(numbers)] = torch.tensor(numbers)
    _put(header.view(torch.uint8), link.rank + 1, link)


def _receive_header(link: StateLink, device: torch.device) -> RowShapes:
    numbers = iter(_get(HEADER * 8, link.rank - 1, link, device).view(torch.int64).tolist())
    found = {}
    for _ in range(next(numbers)):
        kind, index, dtype, dims = (next(numbers) for _ in range(4))
        found[KINDS[kind], index] = (tuple(next(numbers) for _ in range(dims)), DTYPES[dtype])
    return found


def _dtypes(x: Tensor) -> CallDtypes:
    kind = x.device.type
    return x.dtype, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
