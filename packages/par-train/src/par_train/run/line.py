"""What a loop logs between two lines of metrics, added up where it lies, so that no step waits for a number."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Value = Tensor | float | int
"""A number, or a tensor with one element, on any device."""


class Gathered:
    """Sums of what was logged since the last line.

    A floating-point value is averaged, an integer counts something and is added up: over steps and data ranks.

    Args:
        device: The device on which the ranks communicate.
        group: The data ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._means: dict[str, tuple[Value, int]] = {}  # sum, and how often
        self._counts: dict[str, Value] = {}

    def __bool__(self) -> bool:
        return bool(self._means or self._counts)

    def add(self, values: Mapping[str, Value]) -> None:
        """Adds the values of a step. Nothing is copied to the host.

        Raises:
            ValueError: A tensor with several elements, or a name that the line itself has.
            TypeError: Something that is no number.
        """
        for name, given in values.items():
            if name in ("step", "seconds"):
                raise ValueError(f"log() was given {name!r}, which every line has already; give it another name")
            if isinstance(given, Tensor):
                if given.numel() != 1:
                    raise ValueError(f"log() was given {name} of shape {tuple(given.shape)}; give one number: its mean")
                number = given.detach().reshape(())
                number = number.double() if given.is_floating_point() else number.long()
                self._add(name, number, floating=given.is_floating_point())
            elif isinstance(given, int | float):
                self._add(name, given, floating=isinstance(given, float))
            else:
                raise TypeError(f"log() was given {name} as a {type(given).__name__}; give a number or a tensor of one")

    def _add(self, name: str, number: Value, *, floating: bool) -> None:
        # A sum is new memory: what was given may be overwritten, as by a CUDA graph.
        if floating:
            total, times = self._means.get(name, (0.0, 0))
            self._means[name] = total + number, times + 1
        else:
            self._counts[name] = self._counts.get(name, 0) + number

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Means and counts over the steps and the data ranks, and begins anew.

        All-reduce of two numbers a mean and one a count over the data group, in fp64. It waits for the device.
        """
        numbers: list[Value] = [number for total, times in self._means.values() for number in (total, times)]
        numbers += self._counts.values()
        sums: Any = [_on(number, self._device) for number in numbers]
        sums = torch.stack(sums) if sums else torch.zeros(0, device=self._device)
        if dist.get_world_size(self._group) > 1 and numbers:
            dist.all_reduce(sums, group=self._group)
        found = iter(sums.tolist())
        means = {name: next(found) / next(found) for name in self._means}
        counts = {name: round(next(found)) for name in self._counts}
        self._means, self._counts = {}, {}
        return means, counts


def _on(number: Value, device: torch.device) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64, device=device)
