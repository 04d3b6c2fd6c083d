"""Whether any rank was asked to leave: one number a step, on which all ranks agree."""

import torch
import torch.distributed as dist
from torch import Tensor


class Vote:
    """Finds, once a step, the largest number that any rank brings.

    All-reduce (max) of one number over the world, from the host's memory under gloo. On another device the number is
    read a step later: by then it is there, and the host never waits for the step that runs.

    Args:
        device: The device on which the ranks communicate.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: tuple[Tensor, torch.Event] | None = None

    def cast(self, number: int) -> int:
        """Brings a number, and gives the largest one of this step, or of the step before."""
        if dist.get_world_size() == 1:
            return number
        largest = torch.full((), number, dtype=torch.int32, device=self._device)  # a kernel: no copy from the host
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return int(largest)
        before, self._sent = self._sent, _to_host(largest)
        if before is None:
            return 0
        before[1].synchronize()
        return int(before[0])


def _to_host(number: Tensor) -> tuple[Tensor, torch.Event]:
    """A copy on the host, which is under way, and the event after which it is there."""
    copy = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
    done = torch.Event(number.device)
    done.record()
    return copy, done
