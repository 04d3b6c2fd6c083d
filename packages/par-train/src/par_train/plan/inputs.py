"""What a prediction is made of, beside the model's shape and the topology. Pure records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a model is trained.

    Args:
        batch: Windows a step, over all ranks together.
        zero: Stage 0 to 3 of what replicas share.
        precision: As in par-precision.
        schedule: Of the pipeline; without one it is not looked at.
        microbatches: Pieces of each replica's batch.

    Raises:
        ValueError: No such stage or precision.
    """

    batch: int
    zero: int = 0
    precision: str = "fp32"
    schedule: str = "1f1b"
    microbatches: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.zero <= 3:
            raise ValueError(f"zero is {self.zero}; it can be 0, 1, 2 or 3")
        if self.precision not in NUMBERS:
            raise ValueError(f"precision is {self.precision!r}; it can be {', '.join(NUMBERS)}")

    @property
    def numbers(self) -> "Numbers":
        """Bytes of numbers in its precision."""
        return NUMBERS[self.precision]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a device and its connections can do: the alpha-beta model.

    A group of ranks moves bytes at `bandwidth` if it lies within a node, else at `network`, one device beside the
    other. Each operation takes `latency` too, times the logarithm to base 2 of the group's size.

    Args:
        memory: Bytes of a device.
        flops: Peak floating-point operations a second.
        efficiency: Part of the peak that a model's products reach.
        bandwidth: Bytes a second into one device from others of its node.
        network: Bytes a second into one device from other nodes.
        latency: Seconds before the first byte of an operation.
        devices_per_node: Ranks that follow one another are in one node.
        gloo: Whether reduce-scatters receive as many bytes as they send, as on CPUs.

    Raises:
        ValueError: A number that is not above 0.
    """

    memory: float = math.inf
    flops: float = 989e12
    efficiency: float = 0.5
    bandwidth: float = 400e9
    network: float = 50e9
    latency: float = 10e-6
    devices_per_node: int = 8
    gloo: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "gloo" and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Bytes of numbers in a precision.

    Args:
        weight: Of a parameter in use.
        gradient: Of its gradient.
        master: Of what the optimizer updates, and of each of its two moments.
        copied: Whether the optimizer updates copies.
        residual: Of the stream that blocks add to.
        product: Of what is multiplied, and of what is communicated for it.
        saved: Of a linear layer's input as it is kept for backward.
        cast: Of the copy of a weight that is kept for backward; 0: there is none.
    """

    weight: int = 4
    gradient: int = 4
    master: int = 4
    copied: bool = False
    residual: int = 4
    product: int = 4
    saved: int = 4
    cast: int = 0


_AUTOCAST = Numbers(product=2, saved=2, cast=2)
_HALF = Numbers(weight=2, gradient=2, copied=True, residual=2, product=2, saved=2)

NUMBERS: Mapping[str, Numbers] = {
    "fp32": Numbers(),
    "tf32": Numbers(),
    "bf16": _HALF,
    "fp16": _HALF,
    "bf16-amp": _AUTOCAST,
    "fp16-amp": _AUTOCAST,
    "bf16-sr": Numbers(weight=2, gradient=2, master=2, residual=2, product=2, saved=2),
    "fp8": Numbers(weight=2, gradient=2, copied=True, residual=2, product=2, saved=1),
}
"""By precision."""

PEAKS: Mapping[str, float] = {"fp32": 67e12, "tf32": 495e12, "fp8": 1979e12}
"""Floating-point operations a second of an H100 in these precisions; 989e12 in the others."""
