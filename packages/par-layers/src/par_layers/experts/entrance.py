"""How the tokens of a tensor group reach its experts, and the sums of outputs come back to the residual layout.

Where experts are whole on a rank, each token enters on one rank of the tensor group: sequence parallelism has cut them
already, otherwise they are cut here. Where an expert is cut over the tensor group, each token enters on all its ranks,
and each of them gives a partial sum.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .._collectives import (
    all_gather_on,
    all_gather_to,
    copy_to,
    finish,
    reduce_from,
    reduce_scatter_on,
    reduce_scatter_to,
    start_all_gather,
)
from ..modes.product_1d import SEQUENCE


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """The way of tokens from the residual layout to experts and back.

    Args:
        group: The tensor group; None where it has one rank.
        sequence: Whether activations are cut along the sequence over it.
        whole: Whether each expert is whole on one rank, so that each token enters on one rank of the group alone.
    """

    group: dist.ProcessGroup | None = None
    sequence: bool = False
    whole: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a model work on the same ranks."""
        return self

    @property
    def cuts_tokens(self) -> bool:
        """Whether each token reaches the router on one rank of the tensor group alone."""
        return self.group is not None and self.whole

    @property
    def sums_parts(self) -> bool:
        """Whether what leaves is the sum of the ranks' parts, so that other partial sums can join it before."""
        return not self.cuts_tokens

    def check(self, x: Tensor, mask: Tensor | None) -> None:
        """Raises ValueError unless an activation has tokens, and a mask is one of all tokens of the tensor group."""
        if x.dim() not in (2, 3) or (x.dim() == 2 and self.sequence):
            allowed = "[B, S, h]" if self.sequence else "[B, S, h], or [M, h] where tokens are of no sequences"
            raise ValueError(f"a mixture of experts was given activations {list(x.shape)}; give {allowed}")
        if mask is None:
            return
        if mask.shape != self._tokens(x):
            raise ValueError(
                f"the mask is {list(mask.shape)}, but the tokens of the tensor group are {list(self._tokens(x))}; give "
                "one value for each of them"
            )

    def sequences(self, x: Tensor) -> Tensor | int | None:
        """Which of this rank's tokens are of one sequence, as a router takes it; None for tokens [M, h]."""
        if x.dim() == 2:
            return None
        rows, length = x.shape[:2]
        if not rows:
            return torch.zeros(1, 0, dtype=torch.bool, device=x.device)  # one that is empty
        if self.sequence or not self.cuts_tokens:
            return rows
        every = torch.arange(rows, device=x.device)
        return self.of_tokens(every.repeat_interleave(length).view(rows, length)) == every.unsqueeze(-1)

    def most_tokens(self, x: Tensor) -> int:
        """The highest number of tokens that a rank of the tensor group sends."""
        tokens = x.numel() // x.shape[-1]
        if self.group is None or self.whole == self.sequence:
            return tokens
        return -(-tokens // self.group.size()) if self.whole else tokens * self.group.size()

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Brings an activation to the router and to the experts.

        Args:
            x: The activation in the residual layout, [..., h].

        Returns:
            This rank's tokens twice, [M, h]: for the router, whose gradient is alike on all ranks that have the token,
            and for the experts, whose gradient is a partial sum on each of these.
        """
        width = x.shape[-1]
        if self.group is None or (self.whole and self.sequence):
            routed = x.reshape(-1, width)
            return routed, routed
        if self.whole:
            routed = cut_rows(x.reshape(-1, width), self.group)
            return routed, routed
        if self.sequence:
            routed, sent = _GatherTwice.apply(x, self.group)  # type: ignore[no-untyped-call]
            return routed.reshape(-1, width), sent.reshape(-1, width)
        routed = x.reshape(-1, width)
        return routed, copy_to(routed, self.group)

    def factors(self, x: Tensor) -> Tensor:
        """What parts of a sum are multiplied by, [M, ...], such as gates: their gradient is a partial sum, too."""
        return x if self.group is None or self.whole else copy_to(x, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """The whole of an activation in the residual layout, for products with columns that are cut."""
        if self.group is None:
            return x
        return all_gather_to(x, self.group, SEQUENCE) if self.sequence else copy_to(x, self.group)

    def reduce(self, parts: Tensor) -> Tensor:
        """Adds the ranks' parts of an activation, back to the residual layout."""
        if self.group is None:
            return parts
        return reduce_scatter_to(parts, self.group, SEQUENCE) if self.sequence else reduce_from(parts, self.group)

    def leave(self, sums: Tensor, x: Tensor) -> Tensor:
        """Brings the sums of experts' outputs back to the residual layout.

        Args:
            sums: What came back for this rank's tokens, [M, h].
            x: The activation that entered.
        """
        if self.sums_parts:
            return self.reduce(sums.view(*self._tokens(x), x.shape[-1]))
        if self.sequence or self.group is None:
            return sums.view(x.shape)
        return join_rows(sums, x.numel() // x.shape[-1], self.group).view(x.shape)

    def of_tokens(self, values: Tensor) -> Tensor:
        """The values of this rank's tokens, [M], where the tensor group has those of all its tokens, [B, S]."""
        if self.group is None or not self.whole:
            return values.flatten()
        if self.sequence:
            return values.chunk(self.group.size(), SEQUENCE)[dist.get_rank(self.group)].flatten()
        return values.flatten().tensor_split(self.group.size())[dist.get_rank(self.group)]

    def _tokens(self, x: Tensor) -> torch.Size:
        """The shape of all tokens of the tensor group, [B, S] or [M]."""
        shape = list(x.shape[:-1])
        if self.sequence and self.group is not None:
            shape[SEQUENCE] *= self.group.size()
        return torch.Size(shape)


def cut_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of what all ranks have alike; their numbers differ by at most one. Backward: joins them.

    Args:
        x: Any tensor [M, h], alike on all ranks.
        group: The ranks that take part.
    """
    rows: Tensor = _CutRows.apply(x, group)  # type: ignore[no-untyped-call]
    return rows


def join_rows(x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All rows, of which each rank has what `cut_rows` gave it. Backward: this rank's rows of the gradient.

    Args:
        x: This rank's rows, [m, h].
        rows: Number of all rows, M.
        group: The ranks that take part.
    """
    joined: Tensor = _JoinRows.apply(x, rows, group)  # type: ignore[no-untyped-call]
    return joined


class _CutRows(torch.autograd.Function):
    """A part of the rows; backward: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = len(x), group
        return _own_rows(x, group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_rows(gradient, ctx.rows, ctx.group), None


class _JoinRows(torch.autograd.Function):
    """An all-gather of rows; backward: a part of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_rows(x, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradient, ctx.group), None, None


class _GatherTwice(torch.autograd.Function):
    """An all-gather along the sequence, for two readers.

    Backward: what all ranks have alike is cut, and what are partial sums is summed and cut, in one reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        gathered = all_gather_on(x, group, SEQUENCE)
        return gathered, gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, alike: Tensor, partial: Tensor) -> tuple[Tensor, None]:
        summed = reduce_scatter_on(partial, ctx.group, SEQUENCE)
        return summed + alike.chunk(ctx.group.size(), SEQUENCE)[dist.get_rank(ctx.group)], None


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.tensor_split(group.size())[dist.get_rank(group)]


def _all_rows(x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather of parts whose lengths differ by at most one, padded to that of the first."""
    ranks = group.size()
    each, longer = divmod(rows, ranks)
    if not longer:
        return finish(start_all_gather(x, group))
    parts = finish(start_all_gather(functional.pad(x, (0, 0, 0, each + 1 - len(x))), group)).split(each + 1)
    return torch.cat([part[: each + (rank < longer)] for rank, part in enumerate(parts)])
