"""Who shares a chunk, and reduce-scatter and all-gather in place on flat buffers.

Two of gloo's collectives are replaced.

- Its reduce-scatter moves as many bytes as an all-reduce. Here it is an all-to-all, and a sum of what arrives in the
  order of the ranks: half the bytes, and the same rounding however the buffer is cut.
- Its all-gather goes around a ring into a buffer of its own, and copies from there. Here every rank sends its share to
  all others at once, right to its place. Between two ranks, two broadcasts do the same on gloo's own threads while the
  caller computes; a caller that only waits sends large shares itself: 32 MiB each way take 18 ms, by broadcasts 25.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from par_groups import backend_of

from ._torch_private import timeout_of
from .layout.buffers import Buffers

_TAG = 7_213_000
"""Tag of the messages that are sent here, so that nobody else between the same ranks takes them for his."""

_LARGE = 2**22
"""Bytes of a share from which on a caller that waits sends it itself; below, a broadcast costs less Python."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Who shares a chunk.

    Args:
        shards: The ranks that each keep a share.
        gathers: The same ranks by the communicator over which parameters are gathered at stage 3, where data decides on
            each rank what comes first, a gathering or a reduction; before stage 3 `shards`.
        replicas: The ranks that keep the same share, for hybrid sharding; None without.
        mean: Whether gradients are averaged over the ranks, or else summed.
    """

    shards: dist.ProcessGroup
    gathers: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    mean: bool

    @property
    def is_pair(self) -> bool:
        """Whether there are two ranks in all: a sum of two is the same in either order, so any all-reduce will do."""
        return self.replicas is None and dist.get_world_size(self.shards) == 2

    def device_of_flags(self, device: torch.device) -> torch.device:
        """The device of what the host wants to know: the CPU, unless a group is of NCCL alone; then the chunks'."""
        groups = [self.shards] if self.replicas is None else [self.shards, self.replicas]
        return torch.device("cpu") if all(backend_of(group, "cpu") for group in groups) else device


def same_ranks(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another communicator of the same ranks, which alone take part, connected for that device here, not in a step."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return group
    unsorted: dict[str, Any] = (
        {} if ranks == sorted(ranks) else {"sort_ranks": False}
    )  # an option since torch 2.13, as are such groups
    made = dist.new_group(
        ranks,
        timeout_of(group),
        str(dist.get_backend_config(group)),
        use_local_synchronization=True,
        group_desc="par_zero gathers",
        **unsorted,
    )
    gathers = cast("dist.ProcessGroup", made)  # this rank is one of them
    all_reduce(torch.zeros(1, device=device), gathers).wait()
    return gathers


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
    flat: torch.Tensor, into: torch.Tensor, group: dist.ProcessGroup, *, mean: bool, buffers: Buffers
) -> Handle:
    """Sums the ranks' buffers, of which each rank keeps its share. Each rank receives n * (N - 1) elements.

    Args:
        flat: (N * n) elements, one share after the other; free for other use after the wait.
        into: (n) elements for this rank's share of the sum. It may be a part of `flat`.
        group: The N ranks.
        mean: Whether it is the mean, whose numbers are divided before they are added: 16 bits would overflow.
        buffers: Lends the memory for what gloo receives.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Handle([], lambda: _put(flat[: into.numel()], into))
    if is_gloo(flat, group):
        received = buffers.take(flat.numel(), flat.dtype, flat.device)
        work = dist.all_to_all_single(received, flat, group=group, async_op=True)

        def finish() -> None:
            rows, scale = received.view(ranks, -1), 1 / ranks if mean else 1
            torch.mul(rows[0], scale, out=into)
            for row in rows[1:]:  # in the order of the ranks
                into.add_(row, alpha=scale)
            buffers.give_back(received)

        return Handle([work], finish)
    total = torch.empty(flat.numel() // ranks, dtype=flat.dtype, device=flat.device)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    work = scatter(total, flat, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, group=group, async_op=True)
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


def average(tensor: torch.Tensor, group: dist.ProcessGroup, *, mean: bool) -> Handle:
    """Sums a tensor over the ranks of a group, in place; or takes the mean, whose numbers are divided before."""
    if mean and is_gloo(tensor, group):  # which has no mean
        tensor.mul_(1 / dist.get_world_size(group))
    elif mean:
        return all_reduce(tensor, group, dist.ReduceOp.AVG)
    return all_reduce(tensor, group)


def _put(total: torch.Tensor, into: torch.Tensor) -> None:
    """Writes a sum to its place."""
    if total.data_ptr() != into.data_ptr():
        into.copy_(total)


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether gloo, which has threads and no streams, would send a tensor."""
    return backend_of(group, tensor.device.type) == "gloo"
