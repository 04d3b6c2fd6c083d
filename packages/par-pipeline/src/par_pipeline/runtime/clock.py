"""Clocks for the start and end of actions: the host's, or an accelerator's, which runs actions later than the host."""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn


class Clock(Protocol):
    """Clock that records moments of a step and returns their times afterwards."""

    def now(self) -> Any:
        """Record this moment, without a wait."""

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """Return the times of moments on the host's `perf_counter`, in seconds. Wait until the moments have passed."""


class HostClock:
    """Clock of stages on a CPU: a moment is a number of seconds."""

    now = staticmethod(perf_counter)

    def seconds(self, moments: Sequence[float]) -> list[float]:
        """Return the moments themselves."""
        return list(moments)


class StreamClock:
    """Clock of stages on an accelerator: a moment is an event in the current stream.

    Args:
        device: Accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        """Record an event in the stream."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, moments: Sequence[torch.Event]) -> list[float]:
        """Return the times of moments in seconds, measured back from the end of the stream's work."""
        last = self.now()
        last.synchronize()
        here = perf_counter()
        return [here - moment.elapsed_time(last) / 1e3 for moment in moments]


def clock_of(modules: Iterable[nn.Module]) -> Clock:
    """Return the clock for the device of the modules' parameters."""
    devices = (parameter.device for module in modules for parameter in module.parameters())
    device = next((each for each in devices if each.type not in ("cpu", "meta")), None)
    return HostClock() if device is None else StreamClock(device)
