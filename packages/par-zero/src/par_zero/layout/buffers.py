"""Memory that one chunk after the other uses."""

import torch


class Buffers:
    """Flat buffers to lend. Fresh memory costs a page fault every 4 KiB, on CPUs up to a tenth of a step."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # of bytes

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Lends the smallest free buffer that has room; without one, makes a new one.

        Args:
            count: Number of elements.
            dtype: Dtype of the elements.
            device: Device on which the buffer lies.

        Returns:
            (count) elements, in which there is something left from before.
        """
        size = count * dtype.itemsize
        free = sorted((buffer for buffer in self._free if buffer.device == device), key=torch.Tensor.numel)
        chosen = next((buffer for buffer in free if buffer.numel() >= size), None)
        if chosen is None:
            chosen = torch.empty(size, dtype=torch.uint8, device=device)
            self._forget(free[:1])  # it is replaced, so there are never more than were lent at one time
        else:
            self._forget([chosen])
        return chosen[:size].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Takes back a buffer that nobody uses any more."""
        storage = buffer.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage))

    def keep(self, count: int) -> bool:
        """Gives the memory of free buffers back, but for that many, the largest. Whether there were more."""
        more = len(self._free) > count
        if more:
            self._free = sorted(self._free, key=torch.Tensor.numel)[-count:]
        return more

    def _forget(self, buffers: list[torch.Tensor]) -> None:
        self._free = [free for free in self._free if not any(free is buffer for buffer in buffers)]
