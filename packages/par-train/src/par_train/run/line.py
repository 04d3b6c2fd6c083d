"""What a loop logs between two lines of metrics, added up on its device, so that no step waits for a number."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import agree

from ..diagnosis.place import Value


@dataclass(kw_only=True)
class _Sum:
    """What was logged under one name: the sum, the number of values, and whether one of them was floating-point."""

    total: Tensor | float = 0
    times: int = 0
    floating: bool = False

    def add(self, number: Tensor | float, *, floating: bool) -> None:
        # A sum is new memory: the caller may overwrite the given tensor, as a CUDA graph does.
        if floating and not self.floating:
            self.floating = True
            self.total = self.total.double() if isinstance(self.total, Tensor) else float(self.total)
        self.total = self.total + (number.double() if self.floating and isinstance(number, Tensor) else number)
        self.times += 1


class Gathered:
    """Sums of what was logged since the last line.

    A floating-point value is averaged, an integer counts something and is added up: over steps and data ranks. Ranks
    may log different names. They keep one table of all names, so that each name has the same place in their sums.

    Args:
        device: The device on which the ranks communicate.
        group: The data ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._sums: dict[str, _Sum] = {}
        self._is_mean: dict[str, bool] = {}  # the table: identical on all ranks of the group, as is its order

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
                self._sums.setdefault(name, _Sum()).add(number, floating=given.is_floating_point())
            elif isinstance(given, int | float | np.integer | np.floating):
                floating = isinstance(given, float | np.floating)
                self._sums.setdefault(name, _Sum()).add(float(given) if floating else int(given), floating=floating)
            else:
                raise TypeError(f"log() was given {name} as a {type(given).__name__}; give a number or a tensor of one")

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Means and counts over the steps and the data ranks, and begins anew. Collective over the data group.

        All-reduce of two numbers a name, in fp64, in front of which a number says whether a rank has something new: a
        name that is not in the table, or a floating-point value for a count. The ranks then agree on a new table, and
        reduce again. It waits for the device.
        """
        news = any(
            name not in self._is_mean or each.floating > self._is_mean[name] for name, each in self._sums.items()
        )
        found = self._reduced(news)
        if found[0]:
            said = agree(None, {name: each.floating for name, each in self._sums.items()}, self._group)
            for each in said.values():
                for name, floating in each.items():
                    self._is_mean[name] = self._is_mean.get(name, False) or floating
            found = self._reduced(news)
        means: dict[str, float] = {}
        counts: dict[str, int] = {}
        for (name, is_mean), total, times in zip(self._is_mean.items(), found[1::2], found[2::2], strict=True):
            if times and is_mean:
                means[name] = total / times
            elif times:
                counts[name] = round(total)
        self._sums = {}
        return means, counts

    def _reduced(self, news: bool) -> list[float]:
        """Whether a rank has news, then sum and number of values for each name of the table, over the data ranks."""
        none = _Sum()
        sums = [self._sums.get(name, none) for name in self._is_mean]
        numbers: list[Tensor | float] = [news, *(number for each in sums for number in (each.total, each.times))]
        packed = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=self._device) for each in numbers])
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(packed, group=self._group)
        found: list[float] = packed.tolist()
        return found
