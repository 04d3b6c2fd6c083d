"""Conversion between the residual layout of a tensor group and the tokens that its ranks send to experts.

If each expert is stored on one rank, each token enters on one rank of the tensor group. Sequence parallelism has split
the tokens already; without it they are split here. If an expert is sharded over the tensor group, each token enters on
all ranks of the group, and each rank returns a partial sum.

In lanes, the router sees all tokens on every rank, because the gradient of its weight is a sum over them, and experts
return complete outputs: `LaneEntrance`.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .._collectives import (
    all_gather_on,
    all_gather_to,
    copy_to,
    finish,
    gather_from,
    reduce_from,
    reduce_scatter_on,
    reduce_scatter_to,
    scatter_to,
    start_all_gather,
)
from ..modes.product_1d import SEQUENCE


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """Conversion of activations from the residual layout to routed tokens, and back.

    Args:
        group: The tensor group; None for a group of one rank.
        sequence: Whether the group splits activations along the sequence.
        whole: Whether each expert is stored on one rank, so that each token enters on only one rank of the group.
    """

    group: dist.ProcessGroup | None = None
    sequence: bool = False
    whole: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: copies of a model use the same ranks."""
        return self

    @property
    def cuts_tokens(self) -> bool:
        """Whether each token reaches the router on only one rank of the tensor group."""
        return self.group is not None and self.whole

    @property
    def sums_parts(self) -> bool:
        """Whether outputs are partial sums, so that other partial sums can be added before the reduction."""
        return not self.cuts_tokens

    def check(self, x: Tensor, mask: Tensor | None) -> None:
        """Raise ValueError unless an activation has a token dim, and a mask has all tokens of the tensor group."""
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
        """Return which tokens of this rank belong to one sequence, as a router expects it; None for tokens [M, h]."""
        if x.dim() == 2:
            return None
        rows, length = x.shape[:2]
        if not rows:
            # A router needs at least one sequence for its mean.
            return torch.zeros(1, 0, dtype=torch.bool, device=x.device)  # one that is empty
        if self.sequence or not self.cuts_tokens:
            return rows
        # A rank's part of the flattened tokens may begin in the middle of a sequence, so membership is computed per
        # token.
        every = torch.arange(rows, device=x.device)
        return self.of_tokens(every.repeat_interleave(length).view(rows, length)) == every.unsqueeze(-1)

    def most_tokens(self, x: Tensor) -> int:
        """Return the maximum number of tokens that a rank of the tensor group sends."""
        tokens = x.numel() // x.shape[-1]
        if self.group is None or self.whole == self.sequence:
            return tokens
        return -(-tokens // self.group.size()) if self.whole else tokens * self.group.size()

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convert an activation to the tokens of the router and the tokens of the experts.

        Args:
            x: The activation in the residual layout, [..., h].

        Returns:
            This rank's tokens [M, h] twice. The gradient of the router's tokens is identical on all ranks that hold the
            token. The gradient of the experts' tokens is a partial sum on each of these ranks.
        """
        # The two gradients need different collectives in backward, so they need two tensors. If each token enters on
        # one rank only, both gradients are complete there, and one tensor serves the router and the experts.
        width = x.shape[-1]
        if self.group is None or (self.whole and self.sequence):
            # Sequence parallelism has split the tokens, and each expert is on one rank: nothing to convert.
            routed = x.reshape(-1, width)
            return routed, routed
        if self.whole:
            routed = cut_rows(x.reshape(-1, width), self.group)
            return routed, routed
        if self.sequence:
            routed, sent = _GatherTwice.apply(x, self.group)  # type: ignore[no-untyped-call]
            return routed.reshape(-1, width), sent.reshape(-1, width)
        routed = x.reshape(-1, width)
        # Every rank computes with its shard of the experts, so the experts' gradient needs an all-reduce; the
        # router's does not.
        return routed, copy_to(routed, self.group)

    def factors(self, x: Tensor) -> Tensor:
        """Return factors of partial sums, such as routing weights, [M, ...]. Their gradient is a partial sum, too."""
        return x if self.group is None or self.whole else copy_to(x, self.group)

    def sent(self, values: Tensor) -> Tensor:
        """Return what belongs to the tokens that this rank sends, [M', ...], of what belongs to the router's, [M, ...].

        The values have no gradient.
        """
        return values

    def weigh(self, full: Tensor, gate: nn.Module, x: Tensor, routed: Tensor) -> Tensor:
        """Return an output in the residual layout, times the sigmoid of a linear layer of the tokens.

        Args:
            full: The output.
            gate: The linear layer, [..., h] to [..., 1].
            x: The activation that entered.
            routed: The router's tokens.
        """
        del routed
        weighed: Tensor = full * gate(x).sigmoid()
        return weighed

    def gather(self, x: Tensor) -> Tensor:
        """Return a full activation for column-parallel matmuls, from the residual layout."""
        if self.group is None:
            return x
        return all_gather_to(x, self.group, SEQUENCE) if self.sequence else copy_to(x, self.group)

    def reduce(self, parts: Tensor) -> Tensor:
        """Sum the partial sums of all ranks, and return the residual layout."""
        if self.group is None:
            return parts
        return reduce_scatter_to(parts, self.group, SEQUENCE) if self.sequence else reduce_from(parts, self.group)

    def leave(self, sums: Tensor, x: Tensor) -> Tensor:
        """Convert the experts' outputs back to the residual layout.

        Args:
            sums: Sum of the experts' outputs for each token of this rank, [M, h].
            x: The activation that entered.
        """
        if self.sums_parts:
            # Each rank returns partial sums for all tokens of the group.
            return self.reduce(sums.view(*self._tokens(x), x.shape[-1]))
        if self.sequence or self.group is None:
            return sums.view(x.shape)
        return join_rows(sums, x.numel() // x.shape[-1], self.group).view(x.shape)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the values of this rank's tokens, [M], from the values of all tokens of the tensor group, [B, S]."""
        if self.group is None or not self.whole:
            return values.flatten()
        if self.sequence:
            return values.chunk(self.group.size(), SEQUENCE)[dist.get_rank(self.group)].flatten()
        return values.flatten().tensor_split(self.group.size())[dist.get_rank(self.group)]

    def _tokens(self, x: Tensor) -> torch.Size:
        """Return the shape of all tokens of the tensor group, [B, S] or [M]."""
        shape = list(x.shape[:-1])
        if self.sequence and self.group is not None:
            shape[SEQUENCE] *= self.group.size()
        return torch.Size(shape)


@dataclass(frozen=True, kw_only=True)
class LaneEntrance(Entrance):
    """`Entrance` of experts in lanes: every rank of the tensor group routes all tokens, and outputs are complete.

    If each expert is stored on one rank, a rank sends a part of the tokens, in the order of one device. Shared experts
    have products in lanes, which begin and end in the residual layout.
    """

    @property
    def cuts_tokens(self) -> bool:
        """Return False: each token reaches the router on all ranks of the tensor group."""
        return False

    @property
    def sums_parts(self) -> bool:
        """Return False: outputs are complete."""
        return False

    def most_tokens(self, x: Tensor) -> int:
        """Return the number of tokens, of which there is no capacity."""
        return x.numel() // x.shape[-1]

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's tokens, [M, h], and those that this rank sends. Both have full gradients."""
        # Each rank computes the same from the gathered tokens, so its part of their gradient is that of its own.
        full = gather_from(x, self.group, SEQUENCE) if self.sequence and self.group is not None else x
        routed = full.reshape(-1, x.shape[-1])
        return routed, self.factors(routed)

    def factors(self, x: Tensor) -> Tensor:
        """Return what this rank sends of the router's values [M, ...]; backward gathers."""
        return cut_rows(x, self.group) if self.group is not None and self.whole else x

    def sent(self, values: Tensor) -> Tensor:
        """Return what belongs to the tokens that this rank sends."""
        return _own_rows(values, self.group) if self.group is not None and self.whole else values

    def weigh(self, full: Tensor, gate: nn.Module, x: Tensor, routed: Tensor) -> Tensor:
        """Return an output times the sigmoid of a linear layer, whose weight's gradient is a sum over all tokens."""
        return full * self._in_residual_layout(gate(routed).sigmoid(), x)

    def gather(self, x: Tensor) -> Tensor:
        """Return the activation: products in lanes gather it themselves."""
        return x

    def reduce(self, parts: Tensor) -> Tensor:
        """Return the sum: products in lanes have added it up."""
        return parts

    def leave(self, sums: Tensor, x: Tensor) -> Tensor:
        """Convert the experts' outputs for the tokens that this rank has sent to the residual layout."""
        if self.group is not None and self.whole:
            sums = join_rows(sums, self._tokens(x).numel(), self.group)
        return self._in_residual_layout(sums, x)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the values of all tokens, [M]."""
        return values.flatten()

    def _in_residual_layout(self, values: Tensor, x: Tensor) -> Tensor:
        """Return values of all tokens [M, n] in the layout of the activation, with its own features."""
        full = values.view(*self._tokens(x), -1)
        return scatter_to(full, self.group, SEQUENCE) if self.sequence and self.group is not None else full


def cut_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of a replicated tensor; backward: all-gather. The numbers of rows differ by at most one.

    Args:
        x: Any tensor [M, h], identical on all ranks.
        group: The tensor-parallel ranks.
    """
    rows: Tensor = _CutRows.apply(x, group)  # type: ignore[no-untyped-call]
    return rows


def join_rows(x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather the rows that `cut_rows` split; backward: return this rank's rows of the gradient.

    Args:
        x: This rank's rows, [m, h].
        rows: Number of rows of all ranks, M.
        group: The tensor-parallel ranks.
    """
    joined: Tensor = _JoinRows.apply(x, rows, group)  # type: ignore[no-untyped-call]
    return joined


class _CutRows(torch.autograd.Function):
    """A part of the rows; backward: an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = len(x), group
        # A view would keep the memory of all rows alive in the graph.
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
        # After the layer every rank holds the same activation, so it has the same gradient.
        return _own_rows(gradient, ctx.group), None, None


class _GatherTwice(torch.autograd.Function):
    """All-gather along the sequence, with one result for the router and one for the experts.

    Backward splits the router's gradient, which is identical on all ranks, and reduce-scatters the experts' gradient,
    which is a partial sum. Two autograd functions would gather twice in forward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        gathered = all_gather_on(x, group, SEQUENCE)
        # Two results of one gather: autograd keeps the gradients of router and experts apart, which need different
        # reductions.
        return gathered, gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, alike: Tensor, partial: Tensor) -> tuple[Tensor, None]:
        # The experts' gradient is a partial sum on each rank. The router's gradient is complete on every rank, so it is
        # only split.
        summed = reduce_scatter_on(partial, ctx.group, SEQUENCE)
        return summed + alike.chunk(ctx.group.size(), SEQUENCE)[dist.get_rank(ctx.group)], None


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.tensor_split(group.size())[dist.get_rank(group)]


def _all_rows(x: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather parts whose lengths differ by at most one. Shorter parts are padded to the first rank's length."""
    ranks = group.size()
    each, longer = divmod(rows, ranks)
    if not longer:
        return finish(start_all_gather(x, group))
    parts = finish(start_all_gather(functional.pad(x, (0, 0, 0, each + 1 - len(x))), group)).split(each + 1)
    return torch.cat([part[: each + (rank < longer)] for rank, part in enumerate(parts)])
