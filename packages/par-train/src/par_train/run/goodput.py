"""Model FLOPs a second, MFU, and where the time went: what lines of metrics say of them, and the summary at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .clock import PHASES, Clock, Exposed
from .progress import interval

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
