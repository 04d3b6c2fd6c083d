"""Differentiable collectives, and the asynchronous collectives that they call.

A functional collective returns a tensor, and `wait_tensor` completes it later. It needs no tensor subclass,
torch.compile traces it, and it overlaps with all computation before the wait. Layers call functional collectives only
through this module; context parallelism (`context`) calls them by group name. Gathers and scatters on dim 0 need no
copy; on any other dim they need one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import sendable, tree

from ._torch_private import functional_collectives, group_of_name, node_class, number_of_dispatch_modes

par_wait_axis = ""
"""See `par_groups.attributes.WAIT_AXIS`."""

# Asynchronous collectives: `start_...` starts one, and `finish` waits for it.


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Start an all-reduce over `group`; `finish` returns the result, of x's shape.

    Args:
        x: This rank's tensor; unchanged.
        group: The ranks.
        op: Reduction: "sum", "max" or "min".
    """
    started: Tensor = functional_collectives.all_reduce.default(x.contiguous(), op, group.group_name)
    return started


def start_all_reduce_(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-reduce of a contiguous temporary.

    The temporary is overwritten if `may_overwrite()` is true, which saves a copy and most of the dispatch.

    Returns:
        A function that waits and returns the sum.
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
    """Return whether the result of the last operation may be overwritten, because nothing else holds it.

    It is false in graphs of torch.compile, which decide on in-place operations themselves, and under a dispatch mode.
    A dispatch mode may have saved the result, as selective activation checkpointing does. A collective that overwrites
    the result does not change its version counter, so autograd would not report the error.
    """
    return not torch.compiler.is_compiling() and not number_of_dispatch_modes()


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Start an all-gather over `group`, along dim 0; `finish` returns the result."""
    x = x.contiguous()
    # Only graphs and dispatch modes use the operator that allocates its own output. With gloo, two such operators that
    # finish at the same time may free the same memory: each of a group's two threads stores the name of its last work
    # without a lock (torch 2.13, ProcessGroupGloo::runLoop), and only ALLGATHER_COALESCED is long enough for the heap.
    if may_overwrite():
        started: Tensor = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        functional_collectives.all_gather_into_tensor_out.default(x, group.size(), group.group_name, out=started)
    else:
        started = functional_collectives.all_gather_into_tensor.default(x, group.size(), group.group_name)
    return started


def start_exchange(x: Tensor, sizes: list[int], expected: list[int], group: str) -> Callable[[], Tensor]:
    """Start an all-to-all in which ranks exchange different numbers of rows.

    Args:
        x: Rows for all ranks, in the order of ranks.
        sizes: Number of rows for each rank.
        expected: Number of rows from each rank.
        group: Name of the group.

    Returns:
        A function that waits and returns the received rows.
    """
    x = x.contiguous()
    # Only graphs and dispatch modes use torch's functional operator: it enters autograd twice in Python, which takes
    # tens of microseconds for each exchange.
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
    """Start a reduce-scatter over `group`, along dim 0; `finish` returns this rank's part of the sum."""
    started: Tensor = functional_collectives.reduce_scatter_tensor.default(
        x.contiguous(), "sum", group.size(), group.group_name
    )
    return started


def start_tree_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start a reduce-scatter along dim 0 that adds the ranks' terms in a fixed binary tree, adjacent ranks first.

    A backend's own reduction adds in an order that depends on the number of ranks and on the size of the tensor. An
    all-to-all receives the same bytes as a ring's reduce-scatter, and leaves the additions to this rank.

    Returns:
        A function that waits and returns this rank's part of the sum.
    """
    ranks = group.size()
    sizes = [x.shape[0] // ranks] * ranks
    exchanged = start_exchange(x, sizes, sizes, group.group_name)
    return lambda: tree(exchanged().chunk(ranks))


def start_tree_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-reduce that adds as `start_tree_reduce_scatter` does, for the bytes of a ring.

    Returns:
        A function that waits and returns the sum, of x's shape.
    """
    elements = x.numel()
    # Zeros fill up the last part, because all ranks need parts of the same size.
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -elements % group.size()))
    scattered = start_tree_reduce_scatter(flat, group)

    def finished() -> Tensor:
        # Each element was added on one rank only, so all ranks receive the same bits.
        whole = finish(start_all_gather(scattered(), group))
        return whole[:elements].view(x.shape)

    return finished


def finish(started: Tensor) -> Tensor:
    """Wait for a collective and return its result."""
    finished: Tensor = functional_collectives.wait_tensor.default(started)
    return finished


# Collectives along any dim. A dim other than 0 costs one copy, because ranks send and receive contiguous memory.


def finish_all_gather_on(started: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Wait for an all-gather along dim 0, and return its parts concatenated along `dim`."""
    whole = finish(started)
    if dim == 0:
        return whole
    parts: Tensor = whole.unflatten(0, (group.size(), -1))  # [group, ..., part, ...]
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_reduce_scatter_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Start a reduce-scatter over `group`, along `dim`; `finish` returns this rank's part of the sum."""
    if dim == 0:
        return start_reduce_scatter(x, group)
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)  # [group, ..., part, ...]
    return start_reduce_scatter(parts.flatten(0, 1), group)


def start_tree_reduce_scatter_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Callable[[], Tensor]:
    """Start `start_tree_reduce_scatter` along `dim`; the function that it returns has the result."""
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)  # [group, ..., part, ...]
    return start_tree_reduce_scatter(parts.flatten(0, 1), group)


def all_gather_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather along `dim`, and wait for the result."""
    return finish_all_gather_on(start_all_gather(x, group), group, dim)


def reduce_scatter_on(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter along `dim`, and wait for the result."""
    return finish(start_reduce_scatter_on(x, group, dim))


# Differentiable collectives: each has the collective in backward that its forward needs.


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor; backward: all-reduce. It begins a sharded region whose input is replicated.

    Args:
        x: Any tensor, identical on all ranks.
        group: The tensor-parallel ranks.
    """
    # Each rank computes with its own shard of the weights, so its gradient of the shared input is one term of a sum.
    return pair(x, lambda t: t.view_as(t), lambda g: finish(start_all_reduce(g, group)))


def copy_last_to(x: Tensor, group: dist.ProcessGroup, last: int) -> Tensor:
    """Return the tensor; backward: all-reduce the gradient of the last features, and return the rest unchanged.

    Args:
        x: Any tensor, identical on all ranks.
        group: The tensor-parallel ranks.
        last: Number of last features whose gradient is partial on each rank.
    """
    # This is one function of the full tensor, and not a copy_to of a slice: `models.proof` reads autograd's graph, and
    # one node must separate partial gradients from full gradients.

    def backward(g: Tensor) -> Tensor:
        before, partial = g.split([g.shape[-1] - last, last], dim=-1)
        return torch.cat([before, finish(start_all_reduce(partial.contiguous(), group))], dim=-1)

    return pair(x, lambda t: t.view_as(t), backward)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce; backward: return the gradient unchanged. It ends a sharded region in which ranks hold partial sums.

    Args:
        x: This rank's partial sums.
        group: The tensor-parallel ranks.
    """
    # After the sum every rank computes the same, so each already has the full gradient of its own term.
    return pair(x, lambda t: finish(start_all_reduce(t, group)), lambda g: g)


def reduce_from_(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Apply `reduce_from` to a contiguous temporary, which is overwritten if `may_overwrite()` is true."""
    if not may_overwrite():
        return reduce_from(x, group)
    summed: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return summed


def gather_from(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather; backward: return this rank's part of the gradient, which must be identical on all ranks.

    Args:
        x: This rank's part.
        group: The tensor-parallel ranks.
        dim: Dim along which the parts are concatenated.
    """
    dim %= x.dim()
    return pair(x, lambda t: all_gather_on(t, group, dim), lambda g: _own_part(g, group, dim))


def scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Return a copy of this rank's part of a replicated tensor; backward: all-gather.

    Args:
        x: Any tensor, identical on all ranks.
        group: The tensor-parallel ranks.
        dim: Dim that is split.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    dim %= x.dim()
    _check_divides(x, group, dim)
    return pair(x, lambda t: _own_part(t, group, dim).clone(), lambda g: all_gather_on(g, group, dim))


def all_gather_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """All-gather; backward: reduce-scatter. It begins a sharded region whose input is split over the same ranks.

    Args:
        x: This rank's part.
        group: The tensor-parallel ranks.
        dim: Dim along which the parts are concatenated.
    """
    dim %= x.dim()
    # Each rank computes with its own shard after the gather, so its gradient is one term of a sum. Backward must add
    # the terms, which `gather_from` does not.
    return pair(x, lambda t: all_gather_on(t, group, dim), lambda g: reduce_scatter_on(g, group, dim))


def reduce_scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter; backward: all-gather. It ends a sharded region and leaves the sum split over the ranks.

    Args:
        x: This rank's partial sums.
        group: The tensor-parallel ranks.
        dim: Dim that is split.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    dim %= x.dim()
    _check_divides(x, group, dim)
    return pair(x, lambda t: reduce_scatter_on(t, group, dim), lambda g: all_gather_on(g, group, dim))


def tree_reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Apply `reduce_from` with the additions of `start_tree_all_reduce`."""
    return pair(x, lambda t: start_tree_all_reduce(t, group)(), lambda g: g)


def tree_reduce_scatter_to(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Apply `reduce_scatter_to` with the additions of `start_tree_reduce_scatter`."""
    dim %= x.dim()
    _check_divides(x, group, dim)
    return pair(x, lambda t: start_tree_reduce_scatter_on(t, group, dim)(), lambda g: all_gather_on(g, group, dim))


def all_to_all(x: Tensor, group: dist.ProcessGroup, split_dim: int, join_dim: int) -> Tensor:
    """Move the split of a tensor from one dim to another by an all-to-all; backward: the reverse all-to-all.

    Args:
        x: This rank's part.
        group: The ranks that exchange parts.
        split_dim: Dim that the result splits over the ranks; full in `x`.
        join_dim: Dim that `x` splits over the ranks; full in the result.

    Raises:
        ValueError: The dim does not divide by the ranks.
    """
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    _check_divides(x, group, split_dim)
    return pair(
        x,
        lambda t: _all_to_all(t, group, split_dim, join_dim),
        lambda g: _all_to_all(g, group, join_dim, split_dim),
    )


def exchange(x: Tensor, group: dist.ProcessGroup, partner: int) -> Tensor:
    """Swap tensors of the same shape with another rank; backward: swap the gradients.

    Args:
        x: The tensor that this rank sends.
        group: The group of both ranks.
        partner: The other rank, by its index in the group. This rank's own index returns x.
    """
    return pair(x, lambda t: swap(t, group, partner), lambda g: swap(g, group, partner))


def pair(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function whose gradient is another function, one of which communicates.

    Args:
        x: Any tensor.
        forward: Function of the tensor.
        backward: Function from the gradient of the result to that of the tensor.
    """
    result: Tensor = _CollectivePair.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class _CollectivePair(torch.autograd.Function):
    """A collective of one tensor, and the collective in its backward."""

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
    """Send a tensor to the group's rank `partner`, and return the tensor received from it."""
    if partner == dist.get_rank(group):
        return x
    mine = sendable(x.contiguous(), group)
    theirs = torch.empty_like(mine)
    peer = dist.get_global_rank(group, partner)
    # One batch, because over NCCL two ranks that both send first would wait for each other.
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
    sent = torch.cat(x.chunk(parts, split_dim))  # the part for rank 0, then the part for rank 1, ...
    sizes = [sent.shape[0] // parts] * parts
    received = finish(functional_collectives.all_to_all_single.default(sent, sizes, sizes, group.group_name))
    return torch.cat(received.chunk(parts), join_dim)
