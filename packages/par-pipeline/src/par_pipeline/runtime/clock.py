"""When actions begin and end: on the host's clock, or on that of a GPU, which runs them after the host has gone on."""

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn


class Clock(Protocol):
    """Notes moments of a step, and says afterwards when they were."""

    def now(self) -> Any:
        """This moment. It costs no wait."""

    def seconds(self, moments: Sequence[Any]) -> list[float]:
        """When they were, as the host's `perf_counter` has it. Waits until they are over."""


class HostClock:
    """Of stages on a CPU."""

    now = staticmethod(perf_counter)

    def seconds(self, moments: Sequence[float]) -> list[float]:
        """Themselves."""
        return list(moments)


class StreamClock:
    """Of stages on a GPU: a moment is when the current stream comes to it."""

    def now(self) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        """Counted back from now, when the stream has run dry."""
        last = self.now()
        last.synchronize()
        here = perf_counter()
        return [here - moment.elapsed_time(last) / 1e3 for moment in moments]


def clock_of(modules: Iterable[nn.Module]) -> Clock:
    """The clock of what runs some modules."""
    on_gpu = any(parameter.is_cuda for module in modules for parameter in module.parameters())
    return StreamClock() if on_gpu else HostClock()
