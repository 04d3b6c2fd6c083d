"""How strict a device is: what `@pytest.mark.accelerator(...)` specifies."""

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from par_groups import parse_size

NAME = "strict"
"""The type of the device, as in `torch.device("strict")`."""

ENVIRONMENT = "PAR_TESTING_ACCELERATOR"
"""Environment variable that says that this run of pytest has strict devices."""

Segments = Literal["exact", "cuda"]
Races = Literal["error", "record"]
Waits = Literal["count", "error"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The speed of a device in virtual time. The defaults are assumptions for an H100 on PCIe 5, not measurements.

    Args:
        flops: Floating-point operations a second. Default: 400e12.
        memory: Bytes read and written a second. Default: 2.5e12.
        link: Bytes a second between host and device, in each direction. Default: 50e9.
        latency: Seconds that each copy over the link takes in addition. Default: 5e-6.
        launch: Seconds that the host takes to launch a kernel or a copy. Default: 4e-6.
        host: Bytes a second that the host's own arithmetic reads and writes, see `host_works`. Default: 100e9.

    Raises:
        ValueError: A speed is not positive, or a time is negative.
    """

    flops: float = 400e12
    memory: float = 2.5e12
    link: float = 50e9
    latency: float = 5e-6
    launch: float = 4e-6
    host: float = 100e9

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "link", "host"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Costs({name}={getattr(self, name)}): a speed is above 0; pass a larger one")
        for name in ("latency", "launch"):
            if getattr(self, name) < 0:
                raise ValueError(f"Costs({name}={getattr(self, name)}): seconds are at least 0; pass 0 for none")


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The rules of a strict device.

    Args:
        limit: Memory of each device, in bytes or as a text such as "64MiB". Default: None, no limit.
        devices: Number of devices. Default: 1.
        segments: How the allocator takes memory: "exact", as many bytes as a tensor has, so that peaks equal a formula;
            "cuda", segments of 2 and 20 MiB as CUDA's allocator, which shows fragmentation. Default: "exact".
        races: "error" to raise RaceError at the access, "record" to collect messages in `races_seen()`. Default:
            "error".
        waits: "count" to count by place where the host waits for the device, "error" to raise HostWaitError. Default:
            "count".
        costs: Speed of the device in virtual time. Default: that of `Costs()`.

    Raises:
        TypeError: `limit` is neither a size nor None.
        ValueError: A value is not one of those listed.
    """

    limit: int | str | None = None
    devices: int = 1
    segments: Segments = "exact"
    races: Races = "error"
    waits: Waits = "count"
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if self.limit is not None:
            parse_size(self.limit, name="limit", least=512, example="64MiB")
        if self.devices < 1:
            raise ValueError(f"Accelerator(devices={self.devices}): at least 1 is needed; pass a larger number")
        for name, kinds in (("segments", Segments), ("races", Races), ("waits", Waits)):
            if (value := getattr(self, name)) not in get_args(kinds):
                valid = ", ".join(map(repr, get_args(kinds)))
                raise ValueError(f"Accelerator({name}={value!r}): unknown; pass one of {valid}")

    @property
    def bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.limit is None else parse_size(self.limit, name="limit")


def accelerator_type() -> str:
    """Return the type of the device that tests of a GPU run on: "strict" under `pytest --accelerator`, else torch's.

    A test module calls it when it is imported, before the process has a strict device. "cpu" means that the machine has
    no GPU.
    """
    if os.environ.get(ENVIRONMENT):
        return NAME
    import torch  # noqa: PLC0415 - the plugin imports this module in every run of pytest

    # CUDA first, by a question that does not begin to use it: the ranks of this process are its forks.
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
