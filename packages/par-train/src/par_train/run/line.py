"""What a loop logs between two lines of metrics, added up on its device, so that no step waits for a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import agree

Value = Tensor | float | int | np.integer[Any] | np.floating[Any]
"""A number that a loop can log."""


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
    may log different names. They keep one table of all names, so that each name has the same place in their sums. Of a
    name count the data ranks of the lowest rank that logs it: ranks of a tensor group log the same again, and of a
    pipeline the last stage may log alone.

    Args:
        device: The device on which the ranks communicate.
        group: The data ranks of this rank. Each rank of the world belongs to one such group.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device = device
        self._first = dist.get_process_group_ranks(group)[0]  # tells the data ranks from others
        self._sums: dict[str, _Sum] = {}
        self._table: dict[str, tuple[bool, int]] = {}  # is it a mean, whose data ranks count; the same on all ranks

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
        """Means and counts over the steps and the data ranks, and begins anew. Collective over the world.

        All-reduce of two numbers a name, in fp64, in front of which a number says whether a rank has something new: a
        name that is not in the table, a floating-point value for a count, or a lower rank than before. The ranks then
        agree on a new table, and reduce again. It waits for the device.
        """
        news = any(self._changed(name, each.floating, self._first) for name, each in self._sums.items())
        found = self._reduced(news)
        if found[0]:
            mine = {name: each.floating for name, each in self._sums.items()}
            for first, theirs in agree(None, (self._first, mine), None).values():
                for name, floating in theirs.items():
                    is_mean, lowest = self._table.get(name, (False, first))
                    self._table[name] = is_mean or floating, min(lowest, first)
            found = self._reduced(news)
        means: dict[str, float] = {}
        counts: dict[str, int] = {}
        for (name, (is_mean, _)), total, times in zip(self._table.items(), found[1::2], found[2::2], strict=True):
            if times and is_mean:
                means[name] = total / times
            elif times:
                counts[name] = round(total)
        self._sums = {}
        return means, counts

    def _changed(self, name: str, floating: bool, first: int) -> bool:
        is_mean, lowest = self._table.get(name, (False, first + 1))
        return floating > is_mean or first < lowest

    def _reduced(self, news: bool) -> list[float]:
        """Whether a rank has news, then sum and number of values for each name of the table, over its data ranks."""
        none = _Sum()
        table = self._table.items()
        sums = [self._sums.get(name, none) if first == self._first else none for name, (_, first) in table]
        numbers: list[Tensor | float] = [news, *(number for each in sums for number in (each.total, each.times))]
        packed = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=self._device) for each in numbers])
        if dist.get_world_size() > 1:
            dist.all_reduce(packed)
        found: list[float] = packed.tolist()
        return found
