"""What a prediction starts from, beside the model's shape and the topology: the training job and the machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .experts.mixture import Load, check_load

RECOMPUTES = ("", "cheap", "layers")
"""What layers may compute again, in the order of the memory that it takes."""

HOST_MARGIN = 0.15
"""Part of a host's memory that is left alone: for the system, its caches, and what reads the data."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training job as the planner sees it: how much is trained at a time, and in which way.

    It starts nothing, and has nothing to do with the job id of torchrun or SLURM.

    Args:
        batch: Number of windows in a step, over all ranks together.
        zero: ZeRO stage, 0 to 3: what data ranks share.
        precision: Name of a precision of par-precision, such as "bf16".
        schedule: Name of the pipeline's schedule; without a pipeline it plays no role.
        microbatches: Number of pieces that each replica's part of the batch is cut into.
        documents: Lengths of the documents that are packed into each row, in their order, of which no token sees
            another document; None: a row is one document.
        recompute: What layers compute again in backward: "" nothing, "cheap" what needs no product, "layers" all but
            their inputs.
        host: Part of the optimizer's state, and of its own copies of parameters, that lies on the host.
        disk: Part of them that lies on a disk.
        parameters_host: Part of the parameters that lies on the host until they are gathered, at stage 3.
        parameters_disk: Part of them that lies on a disk, at stage 3.
        imbalance: Rows of the rank whose experts are busiest, by the mean of all that they are dealt out over; or as
            counted, the number of rows of each expert, of which it follows for any number of ranks.

    Raises:
        ValueError: There is no such stage, precision or recomputation, the parts are more than all, or no rank can be
            as busy.
    """

    batch: int
    zero: int = 0
    precision: str = "fp32"
    schedule: str = "1f1b"
    microbatches: int = 1
    documents: tuple[int, ...] | None = None
    recompute: str = ""
    host: float = 0.0
    disk: float = 0.0
    parameters_host: float = 0.0
    parameters_disk: float = 0.0
    imbalance: Load = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.zero <= 3:
            raise ValueError(f"zero is {self.zero}; it can be 0, 1, 2 or 3")
        if self.precision not in NUMBER_WIDTHS:
            raise ValueError(f"precision is {self.precision!r}; it can be {', '.join(NUMBER_WIDTHS)}")
        if self.recompute not in RECOMPUTES:
            raise ValueError(f"recompute is {self.recompute!r}; it can be {', '.join(map(repr, RECOMPUTES))}")
        check_load(self.imbalance)
        for before in ("", "parameters_"):
            host, disk = (getattr(self, f"{before}{tier}") for tier in ("host", "disk"))
            if host < 0 or disk < 0 or host + disk > 1 + 1e-9:
                raise ValueError(
                    f"{before}host is {host} and {before}disk {disk}; give parts from 0 to 1, together 1 at most"
                )
        if self.parameters_offloaded and self.zero < 3:
            raise ValueError(
                f"parameters_host is {self.parameters_host} and parameters_disk {self.parameters_disk}, but units are "
                f"gathered before they run at stage 3 alone; this is stage {self.zero}"
            )

    @property
    def optimizer_offloaded(self) -> float:
        """Part of the optimizer's state that lies elsewhere than on the device."""
        return self.host + self.disk

    @property
    def parameters_offloaded(self) -> float:
        """Part of the parameters that does."""
        return self.parameters_host + self.parameters_disk

    @property
    def parts(self) -> dict[str, dict[str, float]]:
        """Which part of what lies in which tier away from the device."""
        return {
            "optimizer": {"host": self.host, "disk": self.disk},
            "parameters": {"host": self.parameters_host, "disk": self.parameters_disk},
        }

    @property
    def numbers(self) -> "NumberWidths":
        """The widths of numbers in this job's precision."""
        return NUMBER_WIDTHS[self.precision]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a device and its connections can do, in the alpha-beta model of communication.

    A group of ranks moves bytes at `bandwidth` if it lies within a node, else at `network`, where each device has a
    connection of its own. An operation also takes `latency`, times the logarithm to base 2 of the group's size.

    Args:
        memory: Bytes of memory of a device.
        flops: Peak floating-point operations a second of a device.
        efficiency: Part of the peak that a model's matrix products reach.
        bandwidth: Bytes a second into one device from the others of its node.
        network: Bytes a second into one device from other nodes.
        latency: Seconds that an operation takes before its first byte.
        devices_per_node: Number of devices in a node; ranks that follow one another share a node.
        host_memory: Bytes of memory of a node's host, which its devices share; 0: nothing lies there.
        disk: Bytes that a node's devices may take of its disk; 0: nothing lies there.
        link: Bytes a second between a device and its host, each way.
        host_step: Bytes a second that a node's processors read and write in an optimizer's step.
        disk_read: Bytes a second that a node reads from its disk.
        disk_write: Bytes a second that a node writes to its disk.
        gloo: Whether reduce-scatters receive as many bytes as they send, as gloo's do on CPUs.

    Raises:
        ValueError: A number is not above 0; or, of host_memory and disk, is below it.
    """

    memory: float = math.inf
    flops: float = 989e12
    efficiency: float = 0.5
    bandwidth: float = 400e9
    network: float = 50e9
    latency: float = 10e-6
    devices_per_node: int = 8
    gloo: bool = False
    host_memory: float = 0.0
    disk: float = 0.0
    link: float = 50e9
    host_step: float = 100e9
    disk_read: float = 6e9
    disk_write: float = 3e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            may_be_0 = name in ("host_memory", "disk")
            if name != "gloo" and not (value >= 0 if may_be_0 else value > 0):
                raise ValueError(f"{name} is {value}; it must be {'0 or above' if may_be_0 else 'above 0'}")

    def ranks_per_host(self, world: int) -> int:
        """Number of devices that share a node's host and disk.

        Args:
            world: Number of ranks.
        """
        return min(self.devices_per_node, world)

    def offload_capacity(self, world: int) -> dict[str, float]:
        """Bytes that a rank may take of its host, of which a margin is left free, and of its disk.

        Args:
            world: Number of ranks.
        """
        sharers = self.ranks_per_host(world)
        return {"host": (1 - HOST_MARGIN) * self.host_memory / sharers, "disk": self.disk / sharers}


PEAKS: Mapping[str, float] = {"fp32": 67e12, "tf32": 495e12, "fp8": 1979e12}
"""Peak floating-point operations a second of an H100 by precision; in those that are not listed it is 989e12."""


@dataclass(frozen=True, kw_only=True)
class NumberWidths:
    """Bytes of one number in a precision, by what the number is.

    Args:
        weight: A parameter as the model uses it.
        gradient: The gradient of a parameter.
        master: A parameter as the optimizer updates it; each of Adam's two moments is as wide.
        copied: Whether the optimizer updates copies of the parameters, not the parameters themselves.
        residual: The stream that blocks add to.
        product: A factor of a matrix product, and what is communicated for the product.
        saved: The input of a linear layer as it is kept for backward.
        cast: The copy of a weight that autocast keeps for backward; 0: there is none.
    """

    weight: int = 4
    gradient: int = 4
    master: int = 4
    copied: bool = False
    residual: int = 4
    product: int = 4
    saved: int = 4
    cast: int = 0


_HALF = NumberWidths(weight=2, gradient=2, copied=True, residual=2, product=2, saved=2)
_AUTOCAST = NumberWidths(product=2, saved=2, cast=2)

NUMBER_WIDTHS: Mapping[str, NumberWidths] = {
    "fp32": NumberWidths(),
    "tf32": NumberWidths(),
    "bf16": _HALF,
    "fp16": _HALF,
    "bf16-amp": _AUTOCAST,
    "fp16-amp": _AUTOCAST,
    "bf16-sr": NumberWidths(weight=2, gradient=2, master=2, residual=2, product=2, saved=2),
    "fp8": NumberWidths(weight=2, gradient=2, copied=True, residual=2, product=2, saved=1),
}
"""The widths of numbers by the name of a precision."""
