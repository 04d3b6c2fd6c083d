"""One number of each rank a step, such as a request to stop, for which no host waits."""

import torch
import torch.distributed as dist
from torch import Tensor

from .copies import copy_to_host


class Vote:
    """An all-reduce (max) of one number over all ranks, once per step.

    Under gloo the number is in host memory. On another device the host reads the result one step later, so that it
    never waits for the running step.

    Args:
        device: The device on which the ranks communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: tuple[Tensor, torch.Event] | None = None

    def cast(self, number: int) -> int:
        """Reduce this rank's number; return the largest number of this step, or of the step before on a device."""
        if dist.get_world_size() == 1:
            return number
        largest = torch.full((), number, dtype=torch.int32, device=self._device)  # a kernel: no copy from the host
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return int(largest)
        before, self._sent = self._sent, copy_to_host(largest)
        # The first step has no result to read yet; 0 is the number of a rank that requests nothing.
        if before is None:
            return 0
        before[1].synchronize()
        return int(before[0])
