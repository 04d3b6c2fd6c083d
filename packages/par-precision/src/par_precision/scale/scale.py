"""The loss scale: one device-side update a step, after all ranks have agreed on whether a gradient was infinite."""

from dataclasses import dataclass, fields
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

LARGEST, SMALLEST = 2.0**127, 2.0**-126
"""The powers of two at the ends of what fp32 holds with all its digits."""


class ScaleSettings(TypedDict, total=False):
    """The settings of `DynamicScale`, which describes each of them."""

    init: float
    growth: float
    backoff: float
    interval: int
    hysteresis: int
    min: float
    max: float
    late: int
    max_skipped: int


@dataclass(eq=False, kw_only=True)
class DynamicScale:
    """A factor for the loss that grows while gradients are finite, and backs off when they are not.

    Args:
        init: The first value.
        growth: Factor of the scale after `interval` finite steps in a row, 1 or more; 1 keeps it.
        backoff: Factor of the scale after a step that was not finite, above 0 and at most 1; 1 keeps it.
        interval: Number of finite steps in a row after which the scale grows.
        hysteresis: Number of steps that were not finite, counted since the last growth, with which the backoff begins.
        min: The lowest value that the scale takes.
        max: The highest value that the scale takes.
        late: Number of additional finite steps that the first growth, and the first one after an infinity, waits for.
        max_skipped: Number of consecutive skipped steps after which `MixedOptimizer.step` raises. A scale needs 32
            skipped steps to come down from 2**32 to 1.

    Attributes:
        value: The scale, an fp32 scalar on the device of the last `update`.

    Raises:
        ValueError: A setting out of its range.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    min: float = 1.0
    max: float = 2.0**24
    late: int = 0
    max_skipped: int = 50

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("growth", self.growth >= 1, "1 or more"),
            ("backoff", 0 < self.backoff <= 1, "above 0 and at most 1"),
            ("interval", self.interval >= 1, "1 or more"),
            ("hysteresis", self.hysteresis >= 1, "1 or more"),
            ("late", self.late >= 0, "0 or more"),
            ("max_skipped", self.max_skipped >= 1, "1 or more"),
            (
                "min",
                SMALLEST <= self.min <= self.max <= LARGEST,
                f"from 2**-126 to max={self.max}, which ends at 2**127",
            ),
            ("init", self.min <= self.init <= self.max, f"from min={self.min} to max={self.max}"),
        ):
            if not valid:
                raise ValueError(f"{name} of the scale is {getattr(self, name)}; give {rule}")
        self.value = torch.tensor(self.init, dtype=torch.float32)
        self._finite = torch.tensor(-self.late, dtype=torch.int32)  # finite steps in a row
        self._patience = torch.tensor(self.hysteresis, dtype=torch.int32)  # others until the backoff begins

    def to_(self, device: torch.device) -> None:
        """Move the scale and its counters to a device."""
        self.value = self.value.to(device)
        self._finite, self._patience = self._finite.to(device), self._patience.to(device)

    @torch.no_grad()
    def update(self, found_inf: Tensor, empty: Tensor | None = None) -> None:
        """Record a step, without making the host wait.

        Args:
            found_inf: Scalar, False or 0 if all gradients were finite; equal on all ranks.
            empty: Scalar, True if all losses of the step had weight 0. Such a step does not change the scale and its
                counters. Default: some loss has a weight.
        """
        if found_inf.device != self.value.device:
            self.to_(found_inf.device)
        if found_inf.is_cpu and not found_inf and int(self._finite) + 1 < self.interval:
            self._finite += 1  # all that happens in most steps; a look at it is free there
            return
        before = self.value, self._finite, self._patience
        # All outcomes are computed on the device and selected there, so that the host reads nothing.
        bad = found_inf != 0
        finite = torch.where(bad, -self.late, self._finite + 1)
        grows = finite >= self.interval  # above it if the saved run had a longer interval
        # Patience returns only at a growth, as in Megatron-LM, so isolated infinities add up until then.
        patience = torch.where(grows, self.hysteresis, self._patience - bad.to(torch.int32))
        backs_off = bad & (patience <= 0)
        value = torch.where(backs_off, self.value * self.backoff, self.value)
        value = torch.where(grows, value * self.growth, value)
        self.value = value.clamp(self.min, self.max)  # a new tensor: graphs of earlier losses keep the old one
        self._finite, self._patience = finite.masked_fill(grows, 0), patience
        # Both outcomes are computed and one is selected, because reading `empty` on the host would wait for the device.
        if empty is not None:
            after = self.value, self._finite, self._patience
            kept = [torch.where(empty, old, new) for old, new in zip(before, after, strict=True)]
            self.value, self._finite, self._patience = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, its counters and its settings, as numbers."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        counters = {"finite": int(self._finite), "patience": int(self._patience)}
        return {"value": float(self.value), **counters, "settings": settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another scale; the settings of this one stay."""
        self.value = torch.full_like(self.value, min(max(state["value"], self.min), self.max))
        self._finite = torch.full_like(self._finite, state["finite"])
        self._patience = torch.full_like(self._patience, state["patience"])

    @classmethod
    def torch(cls, **settings: Unpack[ScaleSettings]) -> "DynamicScale":
        """Return a scale that behaves like torch.amp.GradScaler. Its only bounds are 2**-126 and 2**127, as in fp32.

        Args:
            settings: Settings of `DynamicScale` that replace GradScaler's defaults.
        """
        defaults: ScaleSettings = {"min": SMALLEST, "max": LARGEST}
        return cls(**(defaults | settings))

    @classmethod
    def megatron(cls, **settings: Unpack[ScaleSettings]) -> "DynamicScale":
        """Return a scale like that of Megatron-LM's DynamicGradScaler: init=2**32, interval=1000, hysteresis=2.

        Args:
            settings: Settings of `DynamicScale` in place of Megatron-LM's defaults.
        """
        defaults: ScaleSettings = {"init": 2.0**32, "interval": 1000, "hysteresis": 2, "max": LARGEST}
        return cls(**(defaults | settings))

    @classmethod
    def deepspeed(cls, **settings: Unpack[ScaleSettings]) -> "DynamicScale":
        """Return a scale with the defaults of DeepSpeed's settings: interval=1000, hysteresis=2, late=1.

        DeepSpeed has two scalers. Pass `hysteresis=1` for its FP16_Optimizer, which has no hysteresis. Pass `late=0`
        for its ZeRO stages, whose scale grows as early as torch's.

        Args:
            settings: Settings of `DynamicScale` in place of DeepSpeed's defaults.
        """
        defaults: ScaleSettings = {"interval": 1000, "hysteresis": 2, "max": LARGEST, "late": 1}
        return cls(**(defaults | settings))

    @classmethod
    def static(cls, value: float, *, max_skipped: int = 50) -> "DynamicScale":
        """Return a scale that keeps its value."""
        return cls(init=value, growth=1.0, backoff=1.0, min=value, max=value, max_skipped=max_skipped)
