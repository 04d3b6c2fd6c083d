"""Reduce-scatter and all-gather in place on flat buffers.

Two of gloo's collectives are replaced.

- Its reduce-scatter moves as many bytes as an all-reduce. Here it is an all-to-all, and a sum of what arrives in the
  order of the ranks: half the bytes, and the same rounding however the buffer is cut.
- Its all-gather goes around a ring into a buffer of its own, and copies from there. Here every rank sends its share to
  all others at once, right to its place. Between two ranks, two broadcasts do the same on gloo's own threads while the
  caller computes; a caller that only waits sends large shares itself: 32 MiB each way take 18 ms, by broadcasts 25.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from par_groups import backend_of, group_among

from ._torch_private import timeout_of
from .layout.buffers import Buffers
from .layout.sharers import DataParallelGroup, Groups

par_wait_axis = "data"
"""See `par_groups.attributes.WAIT_AXIS`."""

_TAG = 7_213_000
"""Tag of the messages that are sent here, so that nobody else between the same ranks takes them for his."""

_LARGE = 2**22
"""Bytes of a share from which on a caller that waits sends it itself; below, a broadcast costs less Python."""


def same_ranks(group: dist.ProcessGroup, use: str) -> dist.ProcessGroup:
    """Another communicator of the same ranks, which alone take part. It is to be connected before a step.

    Args:
        group: The ranks.
        use: For what, such as "gathers".
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return group
    return group_among(ranks, timeout_of(group), str(dist.get_backend_config(group)), f"par_zero {use}")


_IN_USE: WeakSet[Groups] = WeakSet()
"""The communicators of all modules that are sharded, and alive."""


def is_in_use(groups: Iterable[dist.ProcessGroup | None]) -> bool:
    """Whether a sharded module reduces or gathers chunks over one of these groups, ignoring groups of one rank."""
    used = {group for each in _IN_USE for group in (*each.both, each.gathers)}
    return any(group in used and dist.get_world_size(group) > 1 for group in groups)


def communicators(
    share: DataParallelGroup, *, gathers: dist.ProcessGroup | None, divisor: int | None, gathers_apart: bool, anew: bool
) -> Groups:
    """The communicators of those who share chunks. Collective over the groups where any is made.

    Args:
        share: The groups that they are given.
        gathers: The one over which parameters are gathered at stage 3; None: one is made.
        divisor: By what the sum of their gradients is divided. None: by nothing.
        gathers_apart: Whether parameters are gathered over another one than that of reductions.
        anew: Whether none that was given is taken, as the chunks of another module go over it: which of two modules
            begins first in a backward pass may differ between the ranks.
    """
    shards, replicas = share.group, share.replicas
    if anew:
        shards = same_ranks(shards, "shards")
        replicas = None if replicas is None else same_ranks(replicas, "replicas")
    if not gathers_apart:
        gathers = shards
    elif gathers is None or anew:
        gathers = same_ranks(share.group, "gathers")
    groups = Groups(shards=shards, gathers=gathers, replicas=replicas, divisor=divisor)
    _IN_USE.add(groups)
    return groups


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Connects communicators for a device by a first all-reduce, which would else be a meeting of ranks in a step."""
    for group in groups:
        all_reduce(torch.zeros(1, device=device), group).wait()


class Handle:
    """A collective under way.

    Args:
        works: What torch returned for its parts.
        finish: What is left to do when all parts have arrived.
    """

    def __init__(self, works: list[Any], finish: Callable[[], None] | None = None) -> None:
        self._works, self._finish = works, finish

    def is_completed(self) -> bool:
        """Whether `wait` would not wait."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Waits until the result is there. A second call does nothing."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Flags:
    """Flags of which each rank learns whether any rank has set them, when it asks. An all-reduce of an int32 for each.

    Args:
        flags: This rank's.
        groups: The groups of ranks that tell each other, one after the other; the first one begins at once.
        device: Where the flags lie while they are exchanged.
    """

    def __init__(self, flags: Sequence[bool], groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        numbers = torch.tensor(flags, dtype=torch.int32)
        # The host would wait for a copy out of memory that is not pinned.
        self._numbers = numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)
        self._others = groups[1:]
        self._handle = all_reduce(self._numbers, groups[0], dist.ReduceOp.MAX) if groups else Handle([])
        self._copied: torch.cuda.Event | None = None

    def pass_on(self) -> None:
        """Goes on with the other groups, and brings what they have told to the host, which does not wait for it."""
        for group in self._others:
            self._handle.wait()
            self._handle = all_reduce(self._numbers, group, dist.ReduceOp.MAX)
        if self._numbers.is_cuda:
            self._handle.wait()  # on the device
            self._numbers = self._numbers.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[bool]:
        """Whether any rank has set each of them. The host waits until that is there."""
        self._handle.wait()
        if self._copied is not None:
            self._copied.synchronize()
        return [bool(number) for number in self._numbers.tolist()]


def reduce_scatter(
    flat: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup, *, scale: float, buffers: Buffers
) -> Handle:
    """Sums the ranks' buffers, of which each rank keeps its share. Each rank receives n * (N - 1) elements.

    Args:
        flat: (N * n) elements, one share after the other; free for other use after the wait.
        into: (n) elements for this rank's share of the sum. It may be a part of `flat`.
        group: The N ranks.
        scale: By what numbers are multiplied before they are added, such as 1 / N for a mean: the sum of 16 bits would
            overflow.
        buffers: Lends the memory for what gloo receives.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Handle([], lambda: _put(flat[: into.numel()], into, scale))
    if is_gloo(flat, group):
        received = buffers.take(flat.numel(), flat.dtype, flat.device)
        work = dist.all_to_all_single(received, flat, group=group, async_op=True)

        def finish() -> None:
            rows = received.view(ranks, -1)
            torch.mul(rows[0], scale, out=into)
            for row in rows[1:]:  # in the order of the ranks
                into.add_(row, alpha=scale)
            buffers.give_back(received)

        return Handle([work], finish)
    total = torch.empty(flat.numel() // ranks, dtype=flat.dtype, device=flat.device)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    work = scatter(total, flat, _scaled_(flat, ranks, scale), group=group, async_op=True)
    return Handle([work], lambda: _put(total, into))


def all_gather(flat: torch.Tensor, share: torch.Tensor, group: dist.ProcessGroup, *, overlapped: bool = True) -> Handle:
    """Gives every rank the shares of all. Each rank receives n * (N - 1) elements.

    Args:
        flat: (N * n) elements, for all shares.
        share: (n) elements, this rank's share; they may be its own place in `flat`.
        group: The N ranks.
        overlapped: Whether the caller computes before it waits.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1 or is_gloo(flat, group):
        places, rank = flat.chunk(ranks), dist.get_rank(group)
        if share.data_ptr() != places[rank].data_ptr():
            places[rank].copy_(share)
        if (ranks == 2 and (overlapped or share.nbytes < _LARGE)) or not flat.is_cpu:  # gloo sends from the CPU alone
            sources = range(ranks)
            return Handle([dist.broadcast(places[i], group=group, group_src=i, async_op=True) for i in sources])
        others = [(rank + step) % ranks for step in range(1, ranks)]  # not all to the same one first
        receives = [dist.irecv(places[other], group=group, group_src=other, tag=_TAG) for other in others]
        sends = [dist.isend(share, group=group, group_dst=other, tag=_TAG) for other in others]
        return Handle([*receives, *sends])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return Handle([gather(flat, share, group=group, async_op=True)])


def exchange(
    sent: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], like: torch.Tensor, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Gives every rank what each of them has for it. Waits for all of it.

    Args:
        sent: For each rank of the group what this one has for it, in flat pieces.
        counts: Number of elements that each rank has for this one.
        like: A tensor of the dtype and device of all of them.
        group: The ranks.

    Returns:
        For each rank what it has sent, flat.
    """
    received = like.new_empty(sum(counts))
    sizes = [sum(piece.numel() for piece in pieces) for pieces in sent]
    flat = torch.cat([like.new_empty(0), *(piece for pieces in sent for piece in pieces)])
    dist.all_to_all_single(received, flat, list(counts), sizes, group=group)
    return list(received.split(list(counts)))


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Handle:
    """Sums a tensor over the ranks of a group, in place; or takes its maximum, or what else `op` says."""
    if dist.get_world_size(group) == 1:
        return Handle([])
    return Handle([dist.all_reduce(tensor, op, group=group, async_op=True)])


def scaled_sum(tensor: torch.Tensor, group: dist.ProcessGroup, *, scale: float) -> Handle:
    """Sums a tensor over the ranks of a group, in place, of which each number is multiplied before."""
    ranks = dist.get_world_size(group)
    if ranks == 1 or is_gloo(tensor, group):  # which has no mean
        if scale != 1:
            tensor.mul_(scale)
        return all_reduce(tensor, group)
    return all_reduce(tensor, group, _scaled_(tensor, ranks, scale))


def _scaled_(tensor: torch.Tensor, ranks: int, scale: float) -> Any:
    """The sum that NCCL is to take, of numbers that are multiplied here unless it does that by itself, for a mean."""
    if scale == 1 / ranks:
        return dist.ReduceOp.AVG
    if scale != 1:
        tensor.mul_(scale)
    return dist.ReduceOp.SUM


def _put(total: torch.Tensor, into: torch.Tensor, scale: float = 1) -> None:
    """Writes a sum to its place, multiplied."""
    if scale != 1:
        torch.mul(total, scale, out=into)
    elif total.data_ptr() != into.data_ptr():
        into.copy_(total)


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether gloo, which has threads and no streams, would send a tensor."""
    return backend_of(group, tensor.device.type) == "gloo"
