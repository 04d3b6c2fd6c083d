"""`Monitor`: the watchers of a run: the phases of its time, a profile, goodput and a watchdog.

Phases follow each other, so that they add up to the wall time. The wait for other ranks is sampled: a thread checks 20
times a second whether the program is inside a collective, and of which group. This is correct if the host itself waits,
as under gloo. On a GPU kernels wait and hosts do not, so nothing is reported.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from par_diagnosis import Activity, Watchdog
from par_groups import ProcessGroups, attributes

from ..strategy.strategy import Strategy
from .files import RunFiles
from .output import say
from .policies import MonitoringPolicy
from .profile import Profile
from .progress import interval
from .stop import StoppedEarly

PHASES = ("restart", "data", "step", "validation", "log", "checkpoint")
"""The phases of a run. "restart" is the time from the construction of a `Run` to its first batch."""

_PAUSE = 0.05
_DEPTH = 8
"""Number of frames that are searched, innermost first: a collective has only a few frames of its own."""


class PhaseClock:
    """The time that a run spends in each of its phases.

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


class Exposed:
    """The seconds that this rank waits in collectives of each group, sampled.

    Args:
        groups: Live groups, whose names the results have.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._labels = {id(group): label for label, group in groups.named().items()}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample in a thread while the block runs."""
        watcher = threading.Thread(target=self._watch, daemon=True, name="par-exposed")
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
"""Peak dense operations per second, by a part of the device's name and by the dtype of the matmul."""


def peak_of(device: torch.device, precision: str) -> float | None:
    """Return the peak operations per second of a device in a precision; None if unknown, as for a CPU.

    Args:
        device: Device of a rank.
        precision: Precision of par-precision, such as "bf16-amp".
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = precision.partition("-")[0]
    kind = "16" if kind in ("bf16", "fp16") else kind
    return next((peaks.get(kind) for part, peaks in PEAKS.items() if part in name), None)


@dataclass(kw_only=True)
class Goodput:
    """The shares of a rank's time, model FLOPs per second and MFU.

    Args:
        clock: Phases of the run.
        exposed: Sampled waits for other ranks; None if the host cannot observe them.
        flops: Operations of the full model for one token, forward and backward, summed over ranks; None if unknown.
        peak: Operations per second of all devices together; None if unknown.
        counts: Name of the logged count that `flops` refers to.
    """

    clock: PhaseClock
    exposed: Exposed | None
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
        """Return the shares of the run's time as a line of text."""
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


class Monitor:
    """The watchers of one run.

    Args:
        strategy: Strategy of the run.
        files: Files of the run.
        policy: What to watch.
        facts: Facts about the run for dumps and trackers, such as its options.
        report_errors: Whether the watchdog reports an error that leaves the run; otherwise the program does.

    Attributes:
        activity: Current activity of this rank, for dumps of a hang, and the facts.
        clock: Seconds that the run spent in each phase.
        goodput: Shares of time and model FLOPs; None if the policy requests neither.
    """

    def __init__(
        self,
        strategy: Strategy,
        files: RunFiles,
        policy: MonitoringPolicy,
        facts: Mapping[str, Any],
        *,
        report_errors: bool = True,
    ) -> None:
        self.activity = Activity(dict(facts))
        self.clock = PhaseClock(self.activity)
        self._profile = None if policy.profile is None else Profile(policy.profile, files)
        self.goodput: Goodput | None = None
        if policy.goodput or policy.flops is not None:
            peak = policy.peak_flops or peak_of(strategy.device, strategy.options.precision_name)
            world = None if peak is None else peak * strategy.groups.topology.world_size
            # A GPU's kernels wait for other ranks while the host runs ahead, so only a CPU shows the waiting.
            exposed = Exposed(strategy.groups) if strategy.device.type == "cpu" else None
            self.goodput = Goodput(clock=self.clock, exposed=exposed, flops=policy.flops, peak=world)
        self._watchdog: Watchdog | None = None
        if policy.diagnose is not None and policy.diagnose > 0:
            self._watchdog = Watchdog(
                files.diagnosis,
                strategy.groups,
                timeout=policy.diagnose,
                report=lambda line: say(line, sys.stderr),
                report_errors=report_errors,
                activity=self.activity,
            )

    def start(self, held: ExitStack) -> None:
        """Start what watches in threads. `held` stops the sampling of waits; `stop` stops the rest."""
        if self.goodput is not None and self.goodput.exposed is not None:
            held.enter_context(self.goodput.exposed.sampled())
        if self._watchdog is not None:
            self._watchdog.__enter__()

    def enter(self, step: int, phase: str) -> None:
        """Begin a phase, such as "data" or "checkpoint", after `step` steps."""
        self.clock.enter(step, phase)

    def at(self, step: int) -> None:
        """Start or stop the profiler before a batch, if the step is due."""
        if self._profile is not None:
            self._profile.at(step)

    def end(self) -> None:
        """Write the trace. Collective."""
        if self._profile is not None:
            self._profile.end()

    def stop(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop watching; an error on this rank is reported with its stack."""
        if self._profile is not None:
            self._profile.drop()
        if self._watchdog is not None:
            is_agreed = isinstance(error, StoppedEarly)  # all ranks raise it together, and nothing has failed
            self._watchdog.__exit__(*(None, None, None) if is_agreed else (kind, error, trace))
