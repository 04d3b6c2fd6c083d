"""When actions begin and end: on the host's clock, or on that of a GPU, which runs them after the host has gone on."""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn


class Clock(Protocol):
    """Notes moments of a step, and says afterwards when they were."""

    def now(self) -> Any:
        """Notes this moment, without waiting for anything."""

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """When the moments were, as the host's `perf_counter` has it. Waits until they are over."""


class HostClock:
    """The clock of stages on a CPU: a moment is a number of seconds."""

    now = staticmethod(perf_counter)

    def seconds(self, moments: Sequence[float]) -> list[float]:
        """The moments themselves."""
        return list(moments)


class StreamClock:
    """The clock of stages on a GPU: a moment is when the current stream comes to it."""

    def now(self) -> torch.cuda.Event:
        """Puts an event into the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        """When the moments were, counted back from now, when the stream has run dry."""
        last = self.now()
        last.synchronize()
        here = perf_counter()
        return [here - moment.elapsed_time(last) / 1e3 for moment in moments]


def clock_of(modules: Iterable[nn.Module]) -> Clock:
    """The clock of the device that the modules' parameters are on."""
    on_gpu = any(parameter.is_cuda for module in modules for parameter in module.parameters())
    return StreamClock() if on_gpu else HostClock()
