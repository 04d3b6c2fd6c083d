"""Collectives that can be differentiated, and the asynchronous ones of which they are made.

The functional form (a collective that returns a tensor, and a later `wait_tensor`) costs no tensor subclass, is traced
by torch.compile, and overlaps with whatever is computed before the wait. Layers use it here alone; attention over a cut
sequence (`context`) calls it by the names of groups. What gathers and scatters works on dim 0, where it needs no copy;
another dim costs one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import sendable

from ._torch_private import functional_collectives, group_of_name, node_class, number_of_dispatch_modes

par_wait_axis = ""
"""See `par_groups.attributes.WAIT_AXIS`."""

# Asynchronous: started here, complete after `finish`.


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Starts an all-reduce over `group`; `finish` gives the result, of x's shape.

    Args:
        x: This rank's tensor, which is left alone.
        group: The ranks.
        op: What is done to the ranks' numbers: "sum", "max" or "min".
    """
    started: Tensor = functional_collectives.all_reduce.default(x.contiguous(), op, group.group_name)
    return started


def start_all_reduce_(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Starts an all-reduce of a contiguous temporary.

    It is overwritten if nobody can see it, which saves a copy and most of the dispatch.

    Returns:
        A function that waits for it and gives the sum.
    """
    if not may_overwrite():
        started = start_all_reduce(x, group)
        return lambda: finish(started)
    work = group.allreduce([x])

    def finished() -> Tensor:
        work.wait()
        return x

    return finished


def may_overwrite() -> bool:
    """Whether nobody else can have the result of an operation that has just ended, so that it may be overwritten.

    A graph decides itself what to overwrite. A dispatch mode may have kept the result of an operation, as selective
    activation checkpointing does, and a collective that overwrites it does not even change its version.
    """
    return not torch.compiler.is_compiling() and not number_of_dispatch_modes()


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts an all-gather over `group`, along dim 0; `finish` gives the result.

    The operator that makes its own output is for graphs and dispatch modes alone: with gloo, two of them that end
    together may free the same memory. Each of a group's two threads notes the name of the work that it has ended,
    without a lock (torch 2.13, ProcessGroupGloo::runLoop), and only this one's name, ALLGATHER_COALESCED, is so long
    that it is on the heap.
    """
    x = x.contiguous()
    if may_overwrite():
        started: Tensor = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        functional_collectives.all_gather_into_tensor_out.default(x, group.size(), group.group_name, out=started)
    else:
        started = functional_collectives.all_gather_into_tensor.default(x, group.size(), group.group_name)
    return started


def start_exchange(x: Tensor, sizes: list[int], expected: list[int], group: str) -> Callable[[], Tensor]:
    """Starts to send rows to every rank of a group, and to receive some from each.

    torch's functional operators go through autograd in Python, twice, which takes tens of microseconds: they are for
    dispatch modes alone.

    Args:
        x: The rows for all ranks, one rank's after another's.
        sizes: Number of rows for each rank.
        expected: Number of rows from each rank.
        group: The name of the group.

    Returns:
        A function that waits and gives the rows that arrive.
    """
    x = x.contiguous()
    if not may_overwrite():
        started = functional_collectives.all_to_all_single.default(x, expected, sizes, group)
        return lambda: finish(started)
    arriving = x.new_empty(sum(expected), *x.shape[1:])
    work = group_of_name(group).alltoall_base(arriving, x, expected, sizes)

    def finished() -> Tensor:
        work.wait()
        return arriving

    return finished


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts a reduce-scatter over `group`, along dim 0; `finish` gives this rank's part of the sum."""
    started: Tensor = functional_collectives.reduce_scatter_tensor.default(
        x.contiguous(), "sum", group.size(), group.group_name
    )
    return started


def finish(started: Tensor) -> Tensor:
    """Waits for a collective, and gives its result."""
    finished: Tensor = functional_collectives.wait_tensor.default(started)
    return finished


# On any dim, with the one copy that another dim than 0 costs.


def finish_all_gather_on(started: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """The gathered tensor, its parts one after another along `dim`."""
    whole = finish(started)
    if dim == 0:
        return whole
    parts: Tensor = whole.unflatten(0, (group.size(), -1))  # [group, ..., part, ...]
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Starts a reduce-scatter over `group`, along `dim`; `finish` gives this rank's part of the sum."""
    if dim == 0:
        return start_reduce_scatter(x, group)
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)  # [group, ..., part, ...]
    return start_reduce_scatter(parts.flatten(0, 1), group)


def all_gather_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather along `dim`; waits for it."""
    return finish_all_gather_on(start_all_gather(x, group), group, dim)


def reduce_scatter_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter along `dim`; waits for it."""
    return finish(start_reduce_scatter_on(x, group, dim))


# Differentiable: a collective forward, and the one backward.


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity; backward: all-reduce. For where activations that all ranks have enter a cut region.

    Args:
        x: Any tensor, alike on all ranks.
        group: The ranks that take part.
    """
    return _pair(x, lambda t: t.view_as(t), lambda g: finish(start_all_reduce(g, group)))


def copy_last_to(x: Tensor, group: dist.ProcessGroup, last: int) -> Tensor:
    """Identity; backward: all-reduce of the last features, and identity of those before them.

    One function of the whole tensor, so that autograd's graph says that the gradient is whole from here on.

    Args:
        x: Any tensor, alike on all ranks.
        group: The ranks that take part.
        last: Number of last features whose gradient is partial on each rank.
    """

    def backward(g: Tensor) -> Tensor:
        before, partial = g.split([g.shape[-1] - last, last], dim=-1)
        return torch.cat([before, finish(start_all_reduce(partial.contiguous(), group))], dim=-1)

    return _pair(x, lambda t: t.view_as(t), backward)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; backward: identity. For where a cut region ends in partial sums.

    Args:
        x: This rank's partial sums.
        group: The ranks that take part.
    """
    return _pair(x, lambda t: finish(start_all_reduce(t, group)), lambda g: g)


def reduce_from_(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`reduce_from` of a contiguous temporary, which is overwritten if nobody can see it."""
    if not may_overwrite():
        return reduce_from(x, group)
    summed: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


def gather_from(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather; backward: this rank's part of the gradient, which all ranks have alike.

    Args:
        x: This rank's part.
        group: The ranks that take part.
        dim: The dim along which the parts are joined.
    """
    dim %= x.dim()
    return _pair(x, lambda t: all_gather_on(t, group, dim), lambda g: _own_part(g, group, dim))


def scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """A copy of this rank's part of what all ranks have alike; backward: all-gather.

    Args:
        x: Any tensor, alike on all ranks.
        group: The ranks that take part.
        dim: The dim that is cut.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    dim %= x.dim()
    _check_divides(x, group, dim)
    return _pair(x, lambda t: _own_part(t, group, dim).clone(), lambda g: all_gather_on(g, group, dim))


def all_gather_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather; backward: reduce-scatter, since every rank goes on differently.

    Args:
        x: This rank's part.
        group: The ranks that take part.
        dim: The dim along which the parts are joined.
    """
    dim %= x.dim()
    return _pair(x, lambda t: all_gather_on(t, group, dim), lambda g: reduce_scatter_on(g, group, dim))


def reduce_scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter; backward: all-gather. For where a cut region ends in partial sums, and cut activations follow.

    Args:
        x: This rank's partial sums.
        group: The ranks that take part.
        dim: The dim that is cut.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    dim %= x.dim()
    _check_divides(x, group, dim)
    return _pair(x, lambda t: reduce_scatter_on(t, group, dim), lambda g: all_gather_on(g, group, dim))


def all_to_all(x: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    """All-to-all: what was cut along one dim is cut along another; backward: the way back.

    Args:
        x: This rank's part.
        group: The ranks that take part.
        split_dim: The dim along which the result is cut; in `x` it is whole.
        join_dim: The dim along which `x` is cut; in the result it is whole.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    _check_divides(x, group, split_dim)
    return _pair(
        x,
        lambda t: _all_to_all(t, group, split_dim, join_dim),
        lambda g: _all_to_all(g, group, join_dim, split_dim),
    )


def exchange(x: Tensor, group: dist.ProcessGroup, partner: int) -> Tensor:
    """Swaps tensors of one shape with another rank; backward: swaps the gradients.

    Args:
        x: What this rank sends.
        group: The group of both ranks.
        partner: The other one, by its rank in the group; this rank itself gets x back.
    """
    return _pair(x, lambda t: swap(t, group, partner), lambda g: swap(g, group, partner))


def _pair(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _CollectivePair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _CollectivePair(torch.autograd.Function):
    """A function of one tensor, with its backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(gradient), None, None


def is_collective(node: Any) -> bool:
    """Return whether a node of autograd's graph is a collective of this module that has a collective as its backward.

    Args:
        node: The node, such as the `grad_fn` of a tensor.
    """
    return isinstance(node, node_class(_CollectivePair))


class _ReduceFrom(torch.autograd.Function):
    """All-reduce in place; backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return start_all_reduce_(x, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - torch's signature
        return gradient, None


def swap(x: Tensor, group: dist.ProcessGroup, partner: int) -> Tensor:
    """Sends a tensor to the group's rank `partner`, and returns the tensor that it sent."""
    if partner == dist.get_rank(group):
        return x
    mine = sendable(x.contiguous(), group)
    theirs = torch.empty_like(mine)
    peer = dist.get_global_rank(group, partner)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    )
    for work in works:
        work.wait()
    return theirs.to(x.device)


def _check_divides(x: Tensor, group: dist.ProcessGroup, dim: int) -> None:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} is {x.shape[dim]}, which does not divide by {group.size()} ranks; pad it"
        )


def _own_part(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[dist.get_rank(group)]


def _all_to_all(x: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    parts = group.size()
    sent = torch.cat(x.chunk(parts, split_dim))  # the part for rank 0, then that for rank 1, ...
    sizes = [sent.shape[0] // parts] * parts
    received = finish(functional_collectives.all_to_all_single.default(sent, sizes, sizes, group.group_name))
    return torch.cat(received.chunk(parts), join_dim)
