"""The private communicators of a pipeline, one for each direction, so that a send never waits behind a receive.

Headers go over gloo, whatever the group has: the host waits for them, with a timeout, and they bring word of a failure.
Tensors on GPUs come apart, over NCCL, for which only streams wait.

The groups that par_groups declares (its `Channels`) are something else: all ranks of a world make those together, once.
A pipeline takes any group, makes its lanes among the ranks of that group alone and again after each failure, and its
gloo lanes share one thread.
"""

import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_private import default_store, gloo_options, is_profiled, nccl_options, unheard

par_wait_axis = "pipeline"
"""See `par_groups.attributes.WAIT_AXIS`."""

FIRST, REST, APART = range(3)
"""The parts of a message: its header, with what there is room for behind it; what that announces; and its tensors."""

_FOR_KERNELS = timedelta(minutes=30)  # NCCL counts from when it was asked, and kernels before it take their time


class Lane:
    """One direction between this rank and a peer.

    A message has up to three parts, each of which is sent and received by its number: FIRST and REST on the CPU, and
    APART, its tensors.

    Args:
        peer: The other rank.
        first: The gloo communicator of what is on the CPU.
        second: The communicator of tensors that come apart.
        timeout: The longest wait for a message.
    """

    def __init__(self, peer: int, first: Any, second: Any, timeout: timedelta) -> None:
        self._peer, self._timeout = peer, timeout
        self._communicators: tuple[Any, ...] = (first, first, second)

    def send(self, part: Tensor, number: int) -> Any:
        """Begins to send a part of a message.

        Args:
            part: Its bytes, of uint8.
            number: Which part it is.

        Returns:
            What `wait` takes.

        Raises:
            ConnectionError: The peer is gone.
        """
        try:
            if is_profiled():
                with unheard():
                    return self._communicators[number].send([part], self._peer, number)
            return self._communicators[number].send([part], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self, buffer: Tensor, number: int) -> Any:
        """Begins to receive a part of a message into a buffer of its size, or a larger one; otherwise as `send`."""
        try:
            if is_profiled():
                with unheard():
                    return self._communicators[number].recv([buffer], self._peer, number)
            return self._communicators[number].recv([buffer], self._peer, number)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, work: Any, number: int) -> None:
        """Waits for what `send` or `receive` began.

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
        """Lets go of the communicators. Gloo's connections end with the last reference to them."""
        self._communicators = ()

    def _lost(self, error: RuntimeError) -> ConnectionError:
        seconds, reason = self._timeout.total_seconds(), str(error).splitlines()[0]
        return ConnectionError(f"rank {self._peer} is gone, or did not answer within {seconds:g} s ({reason})")


class Lanes(NamedTuple):
    """The communicators of a pipeline.

    Args:
        up: The gloo communicator of messages to higher ranks.
        down: The gloo communicator of messages to lower ranks.
        up_second: The communicator of tensors to higher ranks that come apart; NCCL where they are on GPUs.
        down_second: The communicator of tensors to lower ranks that come apart; NCCL where they are on GPUs.
        rank: This rank, within the group.
        timeout: The longest wait for a message.
        are_apart: Whether tensors come apart, so that a host need not wait for them.
    """

    up: Any
    down: Any
    up_second: Any
    down_second: Any
    rank: int
    timeout: timedelta
    are_apart: bool

    def to(self, peer: int) -> tuple[Lane, Lane]:
        """The lanes between this rank and a peer: the one to send on, and the one to receive on."""
        up = Lane(peer, self.up, self.up_second, self.timeout)
        down = Lane(peer, self.down, self.down_second, self.timeout)
        return (up, down) if peer > self.rank else (down, up)

    def abort(self) -> None:
        """Ends what NCCL has under way. Gloo's communicators end with their last reference."""
        for first, second in ((self.up, self.up_second), (self.down, self.down_second)):
            if second is not first:
                second.abort()


def make_lanes(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Lanes:
    """Makes the communicators. Collective over the group; ranks outside it take no part, as in `new_group` they must.

    Args:
        group: The ranks of the pipeline.
        device: Where tensors are sent from: a GPU that the group has NCCL for, or the CPU.
        timeout: The longest wait for a message.
    """
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
    if device.type != "cpu":
        options = nccl_options(max(timeout, _FOR_KERNELS))
        up_second, down_second = (make(dist.ProcessGroupNCCL, name, options) for name in ("up_second", "down_second"))
    return Lanes(up, down, up_second, down_second, rank, timeout, device.type != "cpu")


MakeLanes = Callable[[dist.ProcessGroup, torch.device, timedelta], Lanes]
"""What makes the communicators of a pipeline, as `make_lanes` does."""
