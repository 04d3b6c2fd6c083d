"""Where the time of a run goes, model FLOPs a second and MFU: what lines of metrics say of them, and the summary.

Phases are timed as they follow each other, so that they add up to the wall time. What a step waits for other ranks is
sampled: a thread looks 20 times a second whether the program is inside of a collective, and of which group. That is the
truth where the host waits itself, as under gloo; on a GPU kernels wait and hosts do not, and nothing is said.
"""

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

from par_diagnosis import Activity
from par_groups import ProcessGroups, attributes

from .progress import interval

PHASES = ("restart", "data", "step", "validation", "log", "checkpoint")
"""What the time of a run goes into. A restart is all from the making of a `Run` to its first batch."""

_PAUSE = 0.05
_DEPTH = 8
"""Number of frames that are searched, innermost first: a collective has only a few frames of its own."""


class Clock:
    """Times the phases of a run as they follow each other.

    Args:
        activity: Object to which each phase is reported, for the watchdog of the run.
    """

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._taken = dict(self._seconds)
        self._phase, self._since = "restart", time.monotonic()
        activity.update(None, "restart")

    def enter(self, step: int, phase: str) -> None:
        """Begins a phase, which ends the one before.

        Args:
            step: Steps done.
            phase: One of `PHASES`.
        """
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self.activity.update(step, phase)

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since the clock was made; together they are the wall time."""
        now = time.monotonic()
        return {**self._seconds, self._phase: self._seconds[self._phase] + now - self._since}

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        total = self.seconds()
        new = {phase: seconds - self._taken[phase] for phase, seconds in total.items()}
        self._taken = total
        return new


class Exposed:
    """How long this rank's program waits in collectives of each group, sampled.

    Args:
        groups: The live groups; their names are those of the result.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._labels = {id(group): label for label, group in groups.named().items()}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Looks on while the block runs."""
        watcher = threading.Thread(target=self._watch, daemon=True, name="par-exposed")
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def seconds(self) -> Mapping[str, float]:
        """Seconds of waiting by name of the group since the beginning."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Seconds of waiting by name of the group since the last call."""
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
        group = dist.group.WORLD if names["group"] is None else names["group"]
        return self._labels.get(id(group), "world" if names["group"] is None else None)


PEAKS: Mapping[str, Mapping[str, float]] = {
    "B200": {"16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12},
    "H200": {"16": 989e12, "fp8": 1979e12, "tf32": 495e12, "fp32": 67e12},
    "H100": {"16": 989e12, "fp8": 1979e12, "tf32": 495e12, "fp32": 67e12},
    "A100": {"16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
}
"""Dense operations a second of devices, by what their names have in them and by the numbers that are multiplied."""


def peak_of(device: torch.device, precision: str) -> float | None:
    """The peak operations a second of a device in a precision; None where they are not known, as of a CPU.

    Args:
        device: The device.
        precision: A precision of par-precision, such as "bf16-amp".
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = precision.partition("-")[0]
    kind = "16" if kind in ("bf16", "fp16") else kind
    return next((peaks.get(kind) for part, peaks in PEAKS.items() if part in name), None)


@dataclass(kw_only=True)
class Goodput:
    """What a rank knows of its own time and of the model's arithmetic.

    Args:
        clock: The phases of the run.
        exposed: What steps wait for other ranks; None where the host cannot know.
        flops: Operations of the model for one token, forward and backward, of all ranks together; None: unknown.
        peak: Operations a second of all devices together; None: unknown.
        counts: The name of the count that `flops` are of.
    """

    clock: Clock
    exposed: Exposed | None
    flops: float | None
    peak: float | None
    counts: str = "tokens"
    _tokens: float = field(default=0.0, init=False)

    def line(self, counts: Mapping[str, int], seconds: float) -> dict[str, float]:
        """What a line of metrics has: shares of the time since the line before, model FLOPs a second and MFU.

        Args:
            counts: What was counted since the line before, over all ranks.
            seconds: The time since then.
        """
        phases = self.clock.take()
        total = max(sum(phases.values()), 1e-9)
        values = {f"time_{phase}": round(spent / total, 4) for phase, spent in phases.items() if spent}
        if self.exposed is not None:
            exposed = self.exposed.take()
            values |= {f"exposed_{label}": round(spent / total, 4) for label, spent in exposed.items() if spent}
        if self.flops is not None and self.counts in counts:
            self._tokens += counts[self.counts]
            rate = self.flops * counts[self.counts] / max(seconds, 1e-6)
            values["flops_per_second"] = float(f"{rate:.6g}")
            if self.peak is not None:
                values["mfu"] = float(f"{rate / self.peak:.6g}")
        return values

    def summary(self) -> str:
        """Where the time of the run went, in a line."""
        phases = self.clock.seconds()
        total = max(sum(phases.values()), 1e-9)
        exposed = {} if self.exposed is None else self.exposed.seconds()
        steps = phases["step"] / total
        parts = [
            f"{phase} {phases[phase] / total:.1%}"
            for phase in PHASES
            if phase != "step" and phases[phase] / total >= 5e-4
        ]
        waits = [f"waiting for {label} {spent / total:.1%}" for label, spent in sorted(exposed.items())]
        inside = f" ({', '.join(waits)})" if waits else ""
        words = f"{interval(total)}: steps {steps:.1%}{inside}{''.join(f', {part}' for part in parts)}"
        if self.flops is None or not self._tokens:
            return words
        rate = self.flops * self._tokens / total
        mfu = f", MFU {rate / self.peak:.1%} all included" if self.peak is not None else ""
        return f"{words}; {rate:.4g} model FLOPs/s{mfu}"
