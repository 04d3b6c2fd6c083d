"""Inputs of a prediction besides the model and the topology: the training job and the machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .experts.mixture import Load, check_load

RECOMPUTES = ("", "cheap", "layers")
"""Kinds of recomputation, the kind that needs most memory first."""

HOST_MARGIN = 0.15
"""Fraction of host memory that is reserved for the system, its caches and the data loaders."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Batch, sharding and precision of a training job.

    The class starts nothing. It is unrelated to the job id of torchrun or SLURM.

    Args:
        batch: Number of sequences in a step, over all ranks.
        zero: ZeRO stage, 0 to 3; FSDP2 corresponds to stage 3.
        precision: Name of a precision of par-precision, such as "bf16".
        schedule: Name of the pipeline schedule; ignored without a pipeline.
        microbatches: Number of microbatches of each replica.
        documents: Lengths of the documents that are packed into each row, in tokens; tokens attend only to their own
            document. None means that a row is one document.
        recompute: Activation checkpointing: "" none, "cheap" for norms and activation functions, "layers" for full
            layers.
        host: Fraction of the optimizer's state, with its master weights, that is offloaded to the host.
        disk: Fraction of this state that is offloaded to the disk.
        parameters_host: Fraction of the parameters that is offloaded to the host between gathers, at stage 3.
        parameters_disk: Fraction of the parameters that is offloaded to the disk, at stage 3.
        imbalance: Tokens of the busiest rank of experts, relative to the mean; or the token count of each expert, from
            which the imbalance follows for any number of ranks.

    Raises:
        ValueError: The stage, precision or recomputation does not exist, the fractions exceed 1, or the imbalance is
            impossible.
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
                    f"{before}host={host} and {before}disk={disk}: fractions must be 0 to 1, with a sum of 1 at most; "
                    "reduce one of them"
                )
        if self.parameters_offloaded and self.zero < 3:
            raise ValueError(
                f"parameters_host={self.parameters_host} and parameters_disk={self.parameters_disk} need ZeRO stage 3, "
                f"but zero={self.zero}; pass zero=3, or offload only the optimizer's state"
            )

    @property
    def optimizer_offloaded(self) -> float:
        """Fraction of the optimizer's state that is offloaded."""
        return self.host + self.disk

    @property
    def parameters_offloaded(self) -> float:
        """Fraction of the parameters that is offloaded."""
        return self.parameters_host + self.parameters_disk

    @property
    def parts(self) -> dict[str, dict[str, float]]:
        """Offloaded fractions by kind of state and by tier."""
        return {
            "optimizer": {"host": self.host, "disk": self.disk},
            "parameters": {"host": self.parameters_host, "disk": self.parameters_disk},
        }

    @property
    def numbers(self) -> "NumberWidths":
        """Bytes per element in this job's precision."""
        return NUMBER_WIDTHS[self.precision]


def _check_positive(name: str, value: float, *, may_be_0: bool = False) -> None:
    if not (value >= 0 if may_be_0 else value > 0):
        raise ValueError(f"{name}={value}: it must be {'0 or more' if may_be_0 else 'positive'}; pass such a number")


@dataclass(frozen=True, kw_only=True)
class OffloadTiers:
    """Capacity and speed of a node's host memory and disk. By default nothing is offloaded.

    Args:
        host_memory: Bytes of host memory, which the devices of the node share; 0 means that nothing is offloaded there.
        link: Bytes per second between a device and its host, in each direction.
        host_step: Bytes per second that the node's processors read and write in an optimizer step.
        disk: Bytes of disk that the devices of the node may use; 0 means that nothing is offloaded there.
        disk_read: Bytes per second that a node reads from its disk.
        disk_write: Bytes per second that a node writes to its disk.

    Raises:
        ValueError: A capacity is negative, or a speed is not positive.
    """

    host_memory: float = 0.0
    link: float = 50e9
    host_step: float = 100e9
    disk: float = 0.0
    disk_read: float = 6e9
    disk_write: float = 3e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_positive(name, value, may_be_0=name in ("host_memory", "disk"))

    def __bool__(self) -> bool:
        return bool(self.host_memory or self.disk)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speed and memory of the devices and of their connections, in the alpha-beta model of communication.

    A group of ranks moves bytes at `bandwidth` if all its ranks are in one node, and at `network` otherwise. Each
    device has its own network connection. An operation also takes `latency`, times the logarithm to base 2 of the
    group's size.

    Args:
        memory: Bytes of memory of a device.
        flops: Peak floating-point operations per second of a device.
        efficiency: Fraction of the peak that the model's matmuls reach.
        bandwidth: Bytes per second into one device from the other devices of its node.
        network: Bytes per second into one device from other nodes.
        latency: Seconds of an operation before its first byte.
        devices_per_node: Number of devices in a node; consecutive ranks share a node.
        gloo: Whether reduce-scatters receive as many bytes as they send, as gloo's reduce-scatters on CPUs do.
        tiers: Memory of a node for offloaded state.

    Raises:
        ValueError: A number is not positive.
    """

    memory: float = math.inf
    flops: float = 989e12
    efficiency: float = 0.5
    bandwidth: float = 400e9
    network: float = 50e9
    latency: float = 10e-6
    devices_per_node: int = 8
    gloo: bool = False
    tiers: OffloadTiers = OffloadTiers()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("gloo", "tiers"):
                _check_positive(name, value)

    def ranks_per_host(self, world: int) -> int:
        """Return the number of devices that share a node's host and disk.

        Args:
            world: Number of ranks.
        """
        return min(self.devices_per_node, world)

    def offload_capacity(self, world: int) -> dict[str, float]:
        """Return the bytes that a rank may offload to its host, without the reserved part, and to its disk.

        Args:
            world: Number of ranks.
        """
        sharers = self.ranks_per_host(world)
        return {"host": (1 - HOST_MARGIN) * self.tiers.host_memory / sharers, "disk": self.tiers.disk / sharers}


PEAKS: Mapping[str, float] = {"fp32": 67e12, "tf32": 495e12, "fp8": 1979e12}
"""Peak floating-point operations per second of an H100 by precision; other precisions reach 989e12."""


@dataclass(frozen=True, kw_only=True)
class NumberWidths:
    """Bytes per element in a precision, by kind of tensor.

    Args:
        weight: A parameter as the model uses it.
        gradient: The gradient of a parameter.
        master: A parameter as the optimizer updates it; each of Adam's two moments has the same width.
        copied: Whether the optimizer updates master copies instead of the parameters.
        residual: The residual stream.
        product: An operand of a matmul, also during communication.
        saved: The input of a linear layer that autograd saves for backward.
        cast: The copy of a weight that autocast saves for backward; 0 if there is no copy.
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
"""Bytes per element by the name of a precision."""
