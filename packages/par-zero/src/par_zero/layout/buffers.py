"""Memory that one chunk after the other uses."""

import torch


class Buffers:
    """Flat buffers to lend. Fresh memory costs a page fault every 4 KiB, on CPUs up to a tenth of a step."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # bytes

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The smallest buffer that has room for that many elements; what is in it is left from before."""
        size = count * dtype.itemsize
        free = sorted((each for each in self._free if each.device == device), key=torch.Tensor.numel)
        found = next((each for each in free if each.numel() >= size), None)
        if found is None:
            found = torch.empty(size, dtype=torch.uint8, device=device)
            self._forget(free[:1])  # it is replaced, so there are never more than were lent at one time
        else:
            self._forget([found])
        return found[:size].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Takes back what nobody uses any more."""
        storage = buffer.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage))

    def _forget(self, buffers: list[torch.Tensor]) -> None:
        self._free = [each for each in self._free if not any(each is one for one in buffers)]
