"""Assembly of full tensors from the shards of tensor-parallel ranks, for optimizers that need them.

Each rank steps some of the tensors, and has the optimizer's state of these only:

1. When backward ends, each rank's shard of a gradient goes to the rank that steps the tensor (all-to-all).
2. In the step, each rank's shard of the parameter goes there, too (all-to-all).
3. The optimizer steps full tensors.
4. The shards go back (all-to-all).

Every step sends the parameters, because no rank can detect whether another rank wrote its shard since the last step. A
loaded checkpoint writes shards, for example.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, Segment, Segments, Sharding, set_segments

from .._collectives import exchange
from ..layout.chunk import Chunk
from ..layout.gradients import ChunkGradients
from .blocks import MatrixBlock, MatrixPart


@dataclass(eq=False, kw_only=True)
class Assembled:
    """Block of a parameter in this rank's shard of a chunk.

    Args:
        block: Block.
        chunk: Chunk that has the parameter.
        member: Number of the parameter in the chunk.
        whole: Tensor of the optimizer, on the rank that steps the block.
    """

    block: MatrixBlock
    chunk: Chunk
    member: int
    whole: nn.Parameter | None = None

    def part_in(self, updated: torch.Tensor) -> torch.Tensor:
        """Take the elements of the parameter, flat, from elements `updated` of the chunk."""
        start, stop = self.chunk.layout.slots[self.member]
        low, _ = self.chunk.updated
        return updated[start - low : stop - low]


class Assembly:
    """Blocks of one optimizer of which this rank holds shards.

    Args:
        assembled: Blocks, in the same order on all ranks of the group.
        group: Ranks that hold shards. None: this rank holds full parameters.
        copies: Global ranks that step the same blocks as this rank: its replicas and this rank.
    """

    def __init__(self, assembled: Sequence[Assembled], group: dist.ProcessGroup | None, copies: Sequence[int]) -> None:
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._chunks = list(dict.fromkeys(one.chunk for one in assembled))
        # One all-to-all sends one flat tensor, so all blocks in it need the same dtypes.
        kinds: dict[tuple[torch.dtype, ...], list[Assembled]] = {}
        for one in assembled:
            kind = (one.chunk.own.dtype, one.chunk.plan.reduce_dtype, one.chunk.master.dtype)
            kinds.setdefault(kind, []).append(one)
        self._kinds = list(kinds.values())
        for together in self._kinds:
            for one, value in self._put_together(together, [one.chunk.master for one in together]):
                one.whole = nn.Parameter(value)
                one.chunk.wholes.append(one.whole)
                block = one.block
                box = Box(block.start, block.size, 0, tuple(value.stride()), tuple(copies))
                # With equal dtypes the parameters hold all digits; otherwise they are a rounded copy of the tensor.
                derived = value.dtype == one.chunk.own.dtype
                segments = Segments([Segment(block.name, Sharding(block.shape, (box,)))], derived=derived)
                set_segments(one.whole, segments)
        for chunk in self._chunks:
            # The assembled tensors hold all digits, so the chunk's own copy in the wider dtype is freed.
            chunk.master = chunk.own

    @property
    def wholes(self) -> list[tuple[int, nn.Parameter]]:
        """Tensors that this rank steps, each with the number of its param group."""
        parts = chain(*self._kinds)
        return [(one.chunk.members[one.member].group, one.whole) for one in parts if one.whole is not None]

    @torch.no_grad()
    def take_gradients(self, gradients: Sequence[ChunkGradients], *, reduced: bool) -> None:
        """Assemble gradients after a backward pass, and add them to existing gradients. All-to-all.

        Args:
            gradients: Gradients of all trained chunks, by number of the chunk.
            reduced: Whether gradients were summed over the data ranks; otherwise nothing is done.
        """
        if not reduced:
            return
        sums = {chunk: gradients[chunk.number].pop_sum() for chunk in self._chunks}
        for kind in self._kinds:
            for one, gradient in self._put_together(kind, [sums[one.chunk] for one in kind], partial=True):
                if one.whole is not None and one.whole.grad is not None:
                    one.whole.grad.add_(gradient)
                elif one.whole is not None:
                    one.whole.grad = gradient.to(one.whole.dtype)
        for chunk in self._chunks:
            gradients[chunk.number].count_assembled()

    @torch.no_grad()
    def before_step(self, unused: Mapping[Chunk, Sequence[int]]) -> None:
        """Assemble parameters. All-to-all.

        If the optimizer has more digits than the shards, elements that were not written since the last step keep them.

        Args:
            unused: Members of each chunk that had no gradient, which the optimizer skips.
        """
        for kind in self._kinds:
            for one, value in self._put_together(kind, [one.chunk.own for one in kind], in_place=True):
                whole = one.whole
                if whole is None:
                    continue
                if whole.dtype != value.dtype:
                    # An element that still is the rounded value of the optimizer's element was not written.
                    whole.copy_(torch.where(whole.to(value.dtype) == value, whole, value.to(whole.dtype)))
                # The optimizer skips a tensor without a gradient. Zeros would decay or move it.
                if one.member in unused[one.chunk]:
                    whole.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        """Send each rank its shards of the stepped tensors. All-to-all."""
        for kind in self._kinds:
            sent: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
            for one in kind:
                if one.whole is not None:
                    # Shards have the module's dtype, so rounding before the exchange sends fewer bytes.
                    whole = one.whole.to(one.chunk.own.dtype)
                    for piece in one.block.pieces:
                        sent[piece.rank].append(whole[one.block.slices(piece.box)].reshape(-1))
            places: list[list[torch.Tensor]] = [[] for _ in range(self._ranks)]
            for one in kind:
                part = one.part_in(one.chunk.own)
                # The stepper sends its pieces in the order of the blocks, so the positions are listed in the same
                # order.
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
        """Yield the full blocks that this rank steps.

        Args:
            kind: Blocks of one dtype.
            parts: Elements `updated` of the chunk of each block.
            partial: Whether replicas are partial sums that are added up; otherwise one of several replicas is taken.
            in_place: Whether the optimizer's tensors are overwritten if they have the dtype of the shards; otherwise
                each block gets memory of its own.
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
            # More elements than the block has: some pieces are partial sums of the same elements.
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
        """Send every rank the elements that each other rank has for it.

        Args:
            sent: Flat pieces that this rank has for each rank.
            counts: Number of elements that each rank has for this rank.
            like: Tensor with the dtype and the device.
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
    """Assemble the parameters in this rank's shard of some chunks. All-to-all over the group, for each optimizer.

    Args:
        chunks: All chunks.
        blocks: Blocks of each assembled parameter.
        group: Ranks that hold shards. None: this rank holds full parameters.
        copies: Global ranks that step the same blocks as this rank.

    Returns:
        Assembly of each optimizer that has such parameters, by its number.
    """
    found: dict[int, list[Assembled]] = {}
    for chunk in chunks:
        for number, member in enumerate(chunk.members if chunk.plan.assembled else ()):
            if not chunk.stage.shards_state or chunk.layout.owners[number] == chunk.groups.rank:
                found.setdefault(chunk.plan.owner, []).extend(
                    Assembled(block=block, chunk=chunk, member=number) for block in blocks[member.parameter]
                )
    return {owner: Assembly(assembled, group, copies) for owner, assembled in sorted(found.items())}
