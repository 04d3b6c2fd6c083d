"""The private communicators of a pipeline, one for each direction, so that a send never waits behind a receive.

Headers use gloo, regardless of the group's backend: the host waits for them with a timeout, and they report failures.
Tensors on accelerators are sent separately over their own backend, such as NCCL, and only streams wait for them.

`Channels` of par_groups are different: all ranks of a world make them together, once. A pipeline accepts any group and
makes its lanes only among the ranks of that group, again after each failure. Its gloo lanes share one thread.
"""

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import backend_of, group_among

from .._torch_private import default_store, gloo_options, is_profiled, nccl_options, unheard

par_wait_axis = "pipeline"
"""See `par_groups.attributes.WAIT_AXIS`."""

FIRST, REST, APART = range(3)
"""Parts of a message: the header with contents that fit the buffer, the second part that it announces, and tensors."""

_FOR_KERNELS = timedelta(minutes=30)  # NCCL counts from when it was asked, and kernels before it take their time


class Lane:
    """Connection in one direction between this rank and a peer.

    A message has up to three parts, which are sent and received by their number: FIRST and REST on the CPU, and APART,
    the tensors.

    Args:
        peer: Rank at the other end.
        first: Gloo communicator of the CPU parts.
        second: Communicator of separate tensors.
        timeout: Timeout for a message.
    """

    def __init__(self, peer: int, first: Any, second: Any, timeout: timedelta) -> None:
        self._peer, self._timeout = peer, timeout
        # The first two parts share a communicator, whose tags distinguish them.
        self._communicators: tuple[Any, ...] = (first, first, second)

    def send(self, part: Tensor, number: int) -> Any:
        """Begin to send a part of a message.

        Args:
            part: Bytes of the part, uint8.
            number: Number of the part.

        Returns:
            Work object for `wait`.

        Raises:
            ConnectionError: The peer is gone.
        """
        try:
            # gloo writes into the profiler's memory when an operation ends that was begun under it, which may be after
            # the profiler has gone.
            if is_profiled():
                with unheard():
                    return self._communicators[number].send([part], self._peer, number)
            return self._communicators[number].send([part], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self, buffer: Tensor, number: int) -> Any:
        """Begin to receive a part of a message into a buffer of its size or larger; otherwise as `send`."""
        try:
            if is_profiled():
                with unheard():
                    return self._communicators[number].recv([buffer], self._peer, number)
            return self._communicators[number].recv([buffer], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, work: Any, number: int) -> None:
        """Wait for a work object of `send` or `receive`.

        Raises:
            ConnectionError: The peer is gone, or does not answer within the timeout.
        """
        try:
            if number == APART:  # NCCL lets the host wait only if it is given a timeout; the communicator has one
                work.wait()
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        """Release the communicators. Gloo's connections end with the last reference to them."""
        self._communicators = ()

    def _lost(self, error: RuntimeError) -> ConnectionError:
        seconds, reason = self._timeout.total_seconds(), str(error).splitlines()[0]
        return ConnectionError(f"rank {self._peer} is gone, or did not answer within {seconds:g} s ({reason})")


class Lanes(NamedTuple):
    """Communicators of a pipeline.

    Args:
        up: Gloo communicator of messages to higher ranks.
        down: Gloo communicator of messages to lower ranks.
        up_second: Communicator of separate tensors to higher ranks; NCCL or another backend of an accelerator.
        down_second: Communicator of separate tensors to lower ranks, of the same backend.
        rank: This rank, within the group.
        timeout: Timeout for a message.
        are_apart: Whether tensors are sent separately from headers, so that no host waits for them.
    """

    up: Any
    down: Any
    up_second: Any
    down_second: Any
    rank: int
    timeout: timedelta
    are_apart: bool

    def to(self, peer: int) -> tuple[Lane, Lane]:
        """Return the two lanes between this rank and a peer: the lane to send on, and the lane to receive on."""
        up = Lane(peer, self.up, self.up_second, self.timeout)
        down = Lane(peer, self.down, self.down_second, self.timeout)
        # Two communicators for two directions: a send would otherwise queue behind the receive of the same pair.
        return (up, down) if peer > self.rank else (down, up)

    def abort(self) -> None:
        """Stop transfers of separate tensors in flight. Gloo's communicators end with their last reference."""
        for first, second in ((self.up, self.up_second), (self.down, self.down_second)):
            # On a CPU both names are the same gloo communicator, which ends with its last reference. So does that of a
            # backend that cannot abort.
            if second is not first:
                with suppress(NotImplementedError):
                    second.abort()


def make_lanes(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Lanes:
    """Make the communicators. Collective over the group; unlike in `new_group`, other ranks take no part.

    Args:
        group: Ranks of the pipeline.
        device: Device of the sent tensors: an accelerator for which the group has a backend of its own, or the CPU.
        timeout: Timeout for a message.
    """
    # The name is new for every call, so that connections after a failure do not read the keys of the old ones in the
    # store.
    nonce = [uuid.uuid4().hex]
    dist.broadcast_object_list(nonce, group=group, group_src=0)
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def make(kind: Any, name: str, options: Any) -> Any:
        store = dist.distributed_c10d.PrefixStore(f"par_pipeline/{nonce[0]}/{name}", default_store())
        return kind(store, rank, size, options)

    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    # Both directions share one thread: two of them would be in each other's way.
    options = gloo_options(timeout, interfaces)
    up, down = make(dist.ProcessGroupGloo, "up", options), make(dist.ProcessGroupGloo, "down", options)
    up_second, down_second = up, down  # gloo tells messages apart by their tags, too
    longest, backend = max(timeout, _FOR_KERNELS), backend_of(group, device.type)
    if device.type != "cpu" and backend == "nccl":
        options = nccl_options(longest)
        up_second, down_second = (make(dist.ProcessGroupNCCL, name, options) for name in ("up_second", "down_second"))
    elif device.type != "cpu":
        # torch knows how to make a communicator of any registered backend, but only as part of a group.
        ranks = dist.get_process_group_ranks(group)
        up_second, down_second = (
            group_among(ranks, longest, f"{device.type}:{backend}", f"par_pipeline {name}") for name in ("up", "down")
        )
    return Lanes(up, down, up_second, down_second, rank, timeout, device.type != "cpu")


MakeLanes = Callable[[dist.ProcessGroup, torch.device, timedelta], Lanes]
"""Function that makes the communicators of a pipeline, such as `make_lanes`."""
