"""A chunk: parameters that lie in one flat buffer, with their gradients, reduced and gathered as one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .buffers import Buffers
from .packing import Layout


@dataclass(eq=False, kw_only=True)
class Member:
    """A parameter of a chunk.

    Args:
        parameter: The module's.
        names: All its names, tied ones included.
        group: The number of its param group; -1 where no optimizer has it.
        shape: Of the parameter on this rank.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    group: int
    shape: torch.Size


@dataclass(eq=False, kw_only=True)
class Slice:
    """What one tensor of the optimizer holds of a chunk.

    Args:
        tensor: The optimizer's, flat.
        group: The number of its param group.
        start: Its first element in the chunk.
    """

    tensor: nn.Parameter
    group: int
    start: int

    @property
    def stop(self) -> int:
        """One past its last."""
        return self.start + self.tensor.numel()


class Chunk:
    """Flat buffers of some parameters.

    Args:
        members: The parameters.
        layout: Where they lie.
        rank: Whose share this rank keeps.
        flat: All parameters.
        share: This rank's.
        reduce_dtype: Of gradients while they are summed.

    Attributes:
        flat: All parameters, (size) elements. At stage 3 its memory is there only while they are used.
        share: This rank's part of them, (shard) elements; before stage 3 a view of `flat`.
        master: The same share as the optimizer holds it, where that has another dtype; else `share` itself.
        gradient: All gradients, (size) elements; there while they are gathered, and at stages 0 and 1 for good.
        share_gradient: This rank's share of their sum, (shard) elements, where it does not lie in `gradient`.
        reduced: What a reduction leaves, until the optimizer has it: all gradients at stage 0, the share at others.
        slices: What the optimizer holds.
        items: The numbers of the called modules that have its parameters.
        number: Its place in the order in which gradients are expected.
    """

    def __init__(
        self,
        members: Sequence[Member],
        layout: Layout,
        rank: int,
        *,
        flat: torch.Tensor,
        share: torch.Tensor,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.members, self.layout, self.rank = tuple(members), layout, rank
        self.flat, self.share, self.master = flat, share, share
        self.reduce_dtype = reduce_dtype
        self.gradient: torch.Tensor | None = None
        self.share_gradient: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.slices: list[Slice] = []
        self.items: tuple[int, ...] = ()
        self.number = -1
        self.pending = 0
        self.ready: list[bool] = []
        self._places: list[torch.Tensor] = []  # the members' in the last `gradient`, which may come again
        self._filled = False  # whether `gradient` holds sums of this rank that are not reduced yet
        self._held: torch.Tensor | None = None

    @property
    def trained(self) -> bool:
        """Whether its parameters get gradients: those of an optimizer, or of none but asking for them."""
        return any(member.group >= 0 or member.parameter.requires_grad for member in self.members)

    def views(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The members' places in a buffer of this layout, in their shapes."""
        for member, (start, stop) in zip(self.members, self.layout.slots, strict=True):
            yield flat[start:stop].view(member.shape)

    def begin(self) -> None:
        """Expects a backward pass."""
        self.pending = len(self.members)
        self.ready = [False] * len(self.members)

    def forget(self) -> None:
        """Drops gradients that are not reduced."""
        self._filled, self._held = False, None
        for member in self.members:
            member.parameter.grad = None

    def take_gradients(self, buffers: Buffers | None) -> list[int]:
        """Moves what autograd has left in the parameters into the buffer: by copy the first time, then by addition.

        Args:
            buffers: Where the buffer comes from; None: the chunk's own.

        Returns:
            1 for each member that had a gradient, else 0.
        """
        buffer = self._buffer(buffers)
        gradients = [member.parameter.grad for member in self.members]
        places = self._places
        here = [(place, gradient) for place, gradient in zip(places, gradients, strict=True) if gradient is not None]
        into, given = [place for place, _ in here], [gradient for _, gradient in here]
        if self._filled:
            if given:
                torch._foreach_add_(into, given)
        else:
            if len(here) < len(places):
                buffer.zero_()
            if given:
                torch._foreach_copy_(into, given)
        self._filled = True
        for member in self.members:
            member.parameter.grad = None
        return [int(gradient is not None) for gradient in gradients]

    def _buffer(self, buffers: Buffers | None) -> torch.Tensor:
        """The gradient buffer, and what it holds of earlier reductions put aside."""
        if self.gradient is None:
            size, device = self.layout.size, self.share.device
            if buffers is None:
                self.gradient = torch.empty(size, dtype=self.reduce_dtype, device=device)
            else:
                self.gradient = buffers.take(size, self.reduce_dtype, device)
            for start, stop in self.layout.gaps:  # padding is summed with the rest, whatever was there before
                self.gradient[start:stop].zero_()
            if not self._places or self._places[0].untyped_storage().data_ptr() != self.gradient.data_ptr():
                self._places = list(self.views(self.gradient))
        if not self._filled:
            self._held = self._earlier()
        return self.gradient

    def _earlier(self) -> torch.Tensor | None:
        """A copy of what the optimizer still holds of earlier reductions, as far as it is this rank's share."""
        if all(each.tensor.grad is None for each in self.slices):
            return None
        low, high = self.layout.share(self.rank)
        earlier = torch.zeros(high - low, dtype=self.reduce_dtype, device=self.share.device)
        for each in self.slices:
            start, stop = max(each.start, low), min(each.stop, high)
            if each.tensor.grad is not None and start < stop:
                earlier[start - low : stop - low] = each.tensor.grad.view(-1)[start - each.start : stop - each.start]
        return earlier

    def reduction_target(self, stage: int) -> torch.Tensor:
        """Where this rank's share of the sum goes: into the whole buffer, or, from stage 2 on, beside it."""
        low, high = self.layout.share(self.rank)
        if stage < 2 and self.gradient is not None:
            return self.gradient[low:high]
        if self.share_gradient is None:
            self.share_gradient = torch.empty(high - low, dtype=self.reduce_dtype, device=self.share.device)
        return self.share_gradient

    @property
    def has_earlier(self) -> bool:
        """Whether earlier reductions are still to be added to the sum."""
        return self._held is not None

    def add_earlier_(self, share: torch.Tensor) -> None:
        """Adds earlier reductions to the sum that is this rank's share."""
        if self._held is not None:
            share.add_(self._held)
            self._held = None

    def reduced_(self, stage: int, share: torch.Tensor, buffers: Buffers | None) -> None:
        """Takes in a reduction.

        Args:
            stage: Where gradients live.
            share: This rank's share of the sum.
            buffers: Where the whole buffer goes back to; None: the chunk keeps it.
        """
        self.reduced = self.gradient if stage == 0 else share
        if buffers is not None and self.gradient is not None:
            buffers.give_back(self.gradient)
            self.gradient = None
        self._filled = False

    def bind_gradients(self, stage: int) -> None:
        """Shows the optimizer its gradients."""
        if self.reduced is None:
            return
        origin = 0 if stage == 0 else self.layout.share(self.rank)[0]
        for each in self.slices:
            part = self.reduced[each.start - origin : each.stop - origin].view(each.tensor.shape)
            each.tensor.grad = part if part.dtype == each.tensor.dtype else part.to(each.tensor.dtype)
        self.reduced = None  # the optimizer's now, for it to drop


def grouped(members: Iterable[Member], limit: int) -> Iterator[list[Member]]:
    """Neighbours together until they have that many bytes."""
    current: list[Member] = []
    size = 0
    for member in members:
        current.append(member)
        size += member.shape.numel() * member.parameter.element_size()
        if size >= limit:
            yield current
            current, size = [], 0
    if current:
        yield current
