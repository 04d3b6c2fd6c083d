"""Parameters that an optimizer must see whole, put together from the parts that tensor ranks have.

Each rank steps some of them, and has the optimizer's state of these alone:

    backward ends   each rank's part of a gradient goes to the rank that steps the tensor     (all-to-all)
    step            so does each rank's part of the parameter                                 (all-to-all)
                    the optimizer steps whole tensors
                    the parts go back                                                         (all-to-all)

Parameters are sent in every step, as no rank knows whether others were written to since the last one, such as by a
checkpoint that was loaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, Segment, Segments, Sharding, set_segments

from .._collectives import exchange
from ..layout.chunk import Chunk
from .blocks import MatrixBlock, MatrixPart


@dataclass(eq=False, kw_only=True)
class Assembled:
    """A block of a parameter that lies in this rank's share of a chunk.

    Args:
        block: The block.
        chunk: The chunk that has the parameter.
        member: The parameter's number in the chunk.
        whole: The optimizer's tensor, on the rank that steps the block.
    """

    block: MatrixBlock
    chunk: Chunk
    member: int
    whole: nn.Parameter | None = None

    def part_in(self, updated: torch.Tensor) -> torch.Tensor:
        """What elements `updated` of the chunk hold of the parameter, flat."""
        start, stop = self.chunk.layout.slots[self.member]
        low, _ = self.chunk.updated
        return updated[start - low : stop - low]


class Assembly:
    """The blocks of one optimizer of which this rank has parts.

    Args:
        assembled: The blocks, in the same order on all ranks of the group.
        group: The ranks that have parts. None: this rank has all of them.
        copies: The ranks that step the same blocks as this one, by number of the world: replicas, and this one.
    """

    def __init__(self, assembled: Sequence[Assembled], group: dist.ProcessGroup | None, copies: Sequence[int]) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._chunks = list(dict.fromkeys(one.chunk for one in assembled))
        kinds: dict[tuple[torch.dtype, ...], list[Assembled]] = {}
        for one in assembled:
            kind = (one.chunk.own.dtype, one.chunk.reduce_dtype, one.chunk.master.dtype)
            kinds.setdefault(kind, []).append(one)
        self._kinds = list(kinds.values())  # what travels together has one dtype
        for together in self._kinds:
            for one, value in self._put_together(together, [one.chunk.master for one in together]):
                one.whole = nn.Parameter(value)
                one.chunk.wholes.append(one.whole)
                block = one.block
                box = Box(block.start, block.size, 0, tuple(value.stride()), tuple(copies))
                derived = value.dtype == one.chunk.own.dtype  # else the parameters are a rounded copy of it
                segments = Segments([Segment(block.name, Sharding(block.shape, (box,)))], derived=derived)
                set_segments(one.whole, segments)
        for chunk in self._chunks:
            chunk.master = chunk.own  # the whole tensors have all digits

    @property
    def wholes(self) -> list[tuple[int, nn.Parameter]]:
        """What this rank steps: the number of its param group, and the tensor."""
        return [(one.chunk.members[one.member].group, one.whole) for one in self._all if one.whole is not None]

    @property
    def _all(self) -> Iterator[Assembled]:
        for kind in self._kinds:
            yield from kind

    @torch.no_grad()
    def take_gradients(self, pop_sum: Callable[[Chunk], torch.Tensor], *, reduced: bool) -> None:
        """After a backward pass: gradients are put together, and added to those that there are. All-to-all.

        Args:
            pop_sum: Returns elements `updated` of a chunk's sum of gradients, which nothing else keeps.
            reduced: Whether they were summed over the data ranks; else there is nothing to do.
        """
        if not reduced:
            return
        sums = {chunk: pop_sum(chunk) for chunk in self._chunks}
        for kind in self._kinds:
            for one, gradient in self._put_together(kind, [sums[one.chunk] for one in kind], partial=True):
                if one.whole is not None and one.whole.grad is not None:
                    one.whole.grad.add_(gradient)
                elif one.whole is not None:
                    one.whole.grad = gradient.to(one.whole.dtype)

    @torch.no_grad()
    def before_step(self, unused: Mapping[Chunk, Sequence[int]]) -> None:
        """Puts parameters together. All-to-all.

        Where the optimizer has more digits than the parts, those stay of what was not written to since the last step.

        Args:
            unused: For each chunk the members that had no gradient, which the optimizer passes over.
        """
        for kind in self._kinds:
            for one, value in self._put_together(kind, [one.chunk.own for one in kind], in_place=True):
                whole = one.whole
                if whole is None:
                    continue
                if whole.dtype != value.dtype:
                    whole.copy_(torch.where(whole.to(value.dtype) == value, whole, value.to(whole.dtype)))
                if one.member in unused[one.chunk]:
                    whole.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        """Gives each rank its parts of what was stepped. All-to-all."""
        for kind in self._kinds:
            sent: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
            for one in kind:
                if one.whole is not None:
                    whole = one.whole.to(one.chunk.own.dtype)
                    for piece in one.block.pieces:
                        sent[piece.rank].append(whole[one.block.slices(piece.box)].reshape(-1))
            places: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
            for one in kind:
                part = one.part_in(one.chunk.own)
                places[one.block.stepper] += [
                    piece.box.of(part) for piece in one.block.pieces if piece.rank == self._rank
                ]
            counts = [sum(place.numel() for place in of_rank) for of_rank in places]
            for of_rank, values in zip(places, self._exchange(sent, counts, kind[0].chunk.own), strict=True):
                sizes = [place.numel() for place in of_rank]
                for place, value in zip(of_rank, values.split(sizes), strict=True):
                    place.copy_(value.view(place.shape))

    def _put_together(
        self,
        kind: Sequence[Assembled],
        parts: Sequence[torch.Tensor],
        *,
        partial: bool = False,
        in_place: bool = False,
    ) -> Iterator[tuple[Assembled, torch.Tensor]]:
        """The blocks that this rank steps, whole.

        Args:
            kind: Blocks of one dtype.
            parts: For each block, elements `updated` of its chunk.
            partial: Whether copies that are partial sums are added up; else one of several copies is taken.
            in_place: Whether the optimizer's tensors are overwritten, where they have the dtype of the parts; else each
                block gets memory of its own.
        """

        def sends(piece: MatrixPart) -> bool:
            return piece.counts if partial else piece.chosen

        sent: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
        for one, updated in zip(kind, parts, strict=True):
            for piece in one.block.pieces:
                if piece.rank == self._rank and sends(piece):
                    sent[one.block.stepper].append(piece.box.of(one.part_in(updated)).reshape(-1))
        mine = [one for one in kind if one.block.stepper == self._rank]
        counts = [0] * self._ranks
        for piece in (piece for one in mine for piece in one.block.pieces if sends(piece)):
            counts[piece.rank] += piece.box.numel
        received = self._exchange(sent, counts, parts[0])
        taken = [0] * self._ranks
        for one in mine:
            if in_place and one.whole is not None and one.whole.dtype == received[0].dtype:
                whole = one.whole.detach()
            else:
                whole = received[0].new_empty(one.block.size)
            pieces = [piece for piece in one.block.pieces if sends(piece)]
            overlap = sum(piece.box.numel for piece in pieces) > one.block.numel
            if overlap:
                whole.zero_()
            for piece in pieces:
                start, taken[piece.rank] = taken[piece.rank], taken[piece.rank] + piece.box.numel
                value = received[piece.rank][start : taken[piece.rank]].view(piece.box.size)
                place = whole[one.block.slices(piece.box)]
                place.add_(value) if overlap else place.copy_(value)
            yield one, whole

    def _exchange(
        self, sent: Sequence[list[torch.Tensor]], counts: Sequence[int], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gives every rank what each of them has for it.

        Args:
            sent: For each rank what this one has for it, in flat pieces.
            counts: Number of elements that each rank has for this one.
            like: A tensor of the dtype and device.
        """
        if self._group is None:
            return [torch.cat(pieces) if pieces else like.new_empty(0) for pieces in sent]
        return exchange(sent, counts, like, self._group)


def assemble(
    chunks: Sequence[Chunk],
    blocks: Mapping[nn.Parameter, Sequence[MatrixBlock]],
    group: dist.ProcessGroup | None,
    copies: Sequence[int],
) -> dict[int, Assembly]:
    """Puts together what lies in this rank's share of some chunks. All-to-all over the group, for each optimizer.

    Args:
        chunks: All chunks.
        blocks: The blocks of each parameter that is put together.
        group: The ranks that have parts. None: this rank has all of them.
        copies: The ranks that step the same blocks as this one, by number of the world.

    Returns:
        By number of an optimizer, what it steps of them.
    """
    found: dict[int, list[Assembled]] = {}
    for chunk in chunks:
        for number, member in enumerate(chunk.members if chunk.assembled else ()):
            if not chunk.stage.shards_state or chunk.layout.owners[number] == chunk.groups.rank:
                found.setdefault(chunk.owner, []).extend(
                    Assembled(block=block, chunk=chunk, member=number) for block in blocks[member.parameter]
                )
    return {owner: Assembly(assembled, group, copies) for owner, assembled in sorted(found.items())}
