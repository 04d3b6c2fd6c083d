"""Where the time of a job goes: its phases, the waits for other ranks, model FLOPs per second and MFU."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from par_groups import ProcessGroups, attributes

from ._activity import Activity

PHASES = ("restart", "data", "step", "validation", "log", "checkpoint")
"""The phases of a job. "restart" is the time from the construction of the clock to the first batch."""

_PAUSE = 0.05
_DEPTH = 8
"""Number of frames that are searched, innermost first: a collective has only a few frames of its own."""


class PhaseClock:
    """The time that a job spends in each of its phases.

    Phases follow each other, so that they add up to the wall time.

    Args:
        activity: Object to which each phase is reported too, such as that of a `Watchdog`. Default: a new one.

    Attributes:
        activity: The object to which phases are reported.
    """

    def __init__(self, activity: Activity | None = None) -> None:
        self.activity = activity = activity or Activity()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._taken = dict(self._seconds)
        self._phase, self._since = "restart", time.monotonic()
        activity.update(None, "restart")

    def enter(self, step: int, phase: str) -> None:
        """Begin a phase, and end the phase before.

        Args:
            step: Number of steps done.
            phase: One of `PHASES`.
        """
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self.activity.update(step, phase)

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since the clock was created. They add up to the wall time."""
        now = time.monotonic()
        return {**self._seconds, self._phase: self._seconds[self._phase] + now - self._since}

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        total = self.seconds()
        new = {phase: seconds - self._taken[phase] for phase, seconds in total.items()}
        self._taken = total
        return new


class CollectiveWaits:
    """The seconds that the host of this rank waits in collectives of each group, sampled.

    A thread checks 20 times a second whether the program is inside a collective, and of which group. This is correct if
    the host itself waits, as under gloo. On a GPU kernels wait and hosts do not, so nothing is reported.

    Args:
        groups: Process groups by label, or the live groups of a topology, whose labels the results have. Default: only
            the default group, as "world".
    """

    def __init__(self, groups: ProcessGroups | Mapping[str, dist.ProcessGroup] | None = None) -> None:
        named = groups if isinstance(groups, Mapping) else {} if groups is None else groups.named()
        self._labels = {id(group): label for label, group in named.items()}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample in a thread while the block runs."""
        # A sampling thread adds nothing to a collective. A wrapper would add time to each call.
        watcher = threading.Thread(target=self._watch, daemon=True, name="par-collective-waits")
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of waiting since the start, by name of the group."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds of waiting since the last call, by name of the group."""
        total = dict(self._seconds)
        new = {label: seconds - self._taken.get(label, 0.0) for label, seconds in total.items()}
        self._taken = total
        return new

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_PAUSE):
            now = time.monotonic()
            label = self._waits_in(sys._current_frames().get(self._thread))
            if label is not None:
                self._seconds[label] = self._seconds.get(label, 0.0) + now - before
            before = now

    def _waits_in(self, frame: FrameType | None) -> str | None:
        """Return the axis or group in whose collective a program waits; None if it waits in no collective."""
        is_inside = False
        for _ in range(_DEPTH):
            if frame is None:
                break
            axis: str | None = frame.f_globals.get(attributes.WAIT_AXIS.name)
            if axis:
                return axis
            # With the axis "", a module declares that its functions have the group in a variable, as those of torch do.
            is_inside |= axis is not None or frame.f_globals.get("__name__", "").startswith("torch.distributed")
            if is_inside and (label := self._label_in(frame)) is not None:
                return label
            frame = frame.f_back
        return "other" if is_inside else None

    def _label_in(self, frame: FrameType) -> str | None:
        """Return the label of the process group in the variable `group` of a frame, as torch's functions have it."""
        names: dict[str, Any] = frame.f_locals
        if "group" not in names:
            return None
        # torch uses the default group for None.
        group = dist.group.WORLD if names["group"] is None else names["group"]
        return self._labels.get(id(group), "world" if names["group"] is None else None)


PEAKS: Mapping[str, Mapping[str, float]] = {
    "B200": {"16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12},
    "H200": {"16": 989e12, "fp8": 1979e12, "tf32": 495e12, "fp32": 67e12},
    "H100": {"16": 989e12, "fp8": 1979e12, "tf32": 495e12, "fp32": 67e12},
    "A100": {"16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
}
"""Peak dense operations per second, by a part of the device's name and by the dtype of the matmul."""


def peak_flops_of(device: torch.device, precision: str) -> float | None:
    """Return the peak operations per second of a device in a precision; None if unknown, as for a CPU.

    Args:
        device: Device of a rank.
        precision: Dtype of the matmuls, such as "bf16" or "fp8"; a suffix such as that of "bf16-amp" is ignored.
    """
    if device.type == "cpu":
        return None
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    name = "" if name_of is None else name_of(device)
    kind = precision.partition("-")[0]
    kind = "16" if kind in ("bf16", "fp16") else kind
    return next((peaks.get(kind) for part, peaks in PEAKS.items() if part in name), None)


@dataclass(kw_only=True)
class Goodput:
    """The shares of a rank's time, model FLOPs per second and MFU.

    Args:
        clock: Phases of the job.
        waits: Sampled waits for other ranks. None if the host cannot observe them.
        flops: Operations of the full model for one token, forward and backward, summed over ranks; None if unknown.
        peak: Operations per second of all devices together; None if unknown.
        counts: Name of the logged count that `flops` refers to.
    """

    clock: PhaseClock
    waits: CollectiveWaits | None
    flops: float | None
    peak: float | None
    counts: str = "tokens"
    _tokens: float = field(default=0.0, init=False)

    def line(self, counts: Mapping[str, int], seconds: float) -> dict[str, float]:
        """Return values for a line of metrics: shares of the time since the last line, model FLOPs per second and MFU.

        Args:
            counts: Counts since the last line, summed over all ranks.
            seconds: Seconds since the last line.
        """
        phases = self.clock.take()
        total = max(sum(phases.values()), 1e-9)
        values = {f"time_{phase}": round(spent / total, 4) for phase, spent in phases.items() if spent}
        if self.waits is not None:
            exposed = self.waits.take()
            values |= {f"exposed_{label}": round(spent / total, 4) for label, spent in exposed.items() if spent}
        if self.flops is not None and self.counts in counts:
            self._tokens += counts[self.counts]
            rate = self.flops * counts[self.counts] / max(seconds, 1e-6)
            values["flops_per_second"] = float(f"{rate:.6g}")
            if self.peak is not None:
                values["mfu"] = float(f"{rate / self.peak:.6g}")
        return values

    def summary(self) -> str:
        """Return the shares of the run's time as a line of text."""
        phases = self.clock.seconds()
        total = max(sum(phases.values()), 1e-9)
        exposed = {} if self.waits is None else self.waits.seconds()
        steps = phases["step"] / total
        parts = [
            f"{phase} {phases[phase] / total:.1%}"
            for phase in PHASES
            if phase != "step" and phases[phase] / total >= 5e-4
        ]
        waits = [f"waiting for {label} {spent / total:.1%}" for label, spent in sorted(exposed.items())]
        inside = f" ({', '.join(waits)})" if waits else ""
        minutes, seconds = divmod(round(total), 60)
        hours, minutes = divmod(minutes, 60)
        took = f"{f'{hours}:' if hours else ''}{minutes:02}:{seconds:02}"
        words = f"{took}: steps {steps:.1%}{inside}{''.join(f', {part}' for part in parts)}"
        if self.flops is None or not self._tokens:
            return words
        rate = self.flops * self._tokens / total
        mfu = f", MFU {rate / self.peak:.1%} all included" if self.peak is not None else ""
        return f"{words}; {rate:.4g} model FLOPs/s{mfu}"
