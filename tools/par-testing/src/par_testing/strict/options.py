"""How strict: what `@pytest.mark.ranks(n, backend="strict", strict=Strict(...))` says."""

from dataclasses import dataclass
from typing import Literal, get_args

Complete = Literal["late", "early", "drawn"]
Objects = Literal["setup", "refuse", "allow"]
Connect = Literal["setup", "allow"]
Sums = Literal["rank order", "halves"]


Link = tuple[float, float]
"""Seconds a hop, and bytes a second for each rank."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What joins the ranks of virtual time. The defaults are assumptions for hosts of eight H100s, not facts.

    Args:
        inside: Between ranks of one host.
        across: Between hosts. A collective of several ranks of each host has that many of these links.
        ranks_per_host: The ranks of a host.

    Raises:
        ValueError: A value is out of its range.
    """

    inside: Link = (3e-6, 370e9)
    across: Link = (8e-6, 45e9)
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("inside", "across"):
            latency, bandwidth = getattr(self, name)
            if latency < 0 or bandwidth <= 0:
                raise ValueError(f"Links({name}=({latency}, {bandwidth})): seconds of at least 0, bytes/s above 0")
        if self.ranks_per_host < 1:
            raise ValueError(f"Links(ranks_per_host={self.ranks_per_host}): a host has at least 1 rank")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How fast a rank of virtual time computes: an operator takes what its arithmetic or its memory takes, if more.

    Args:
        flops: Floating-point operations a second.
        memory: Bytes read and written a second.

    Raises:
        ValueError: A value is not positive.
    """

    flops: float = 400e12
    memory: float = 2.5e12

    def __post_init__(self) -> None:
        if self.flops <= 0 or self.memory <= 0:
            raise ValueError(f"Compute(flops={self.flops}, memory={self.memory}): give more than 0 of each")


@dataclass(frozen=True, kw_only=True)
class Strict:
    """What a strict process group enforces beside the order of operations.

    Args:
        complete: When an operation writes its outputs. "late": when it is waited for, the last moment that is legal;
            "early": as soon as all ranks have issued it; "drawn": one of the two, by numbers drawn from (draw,
            communicator, position), the same in each run.
        draw: The seed of "drawn".
        slots: How many communicators of one rank can make progress at a time, as if kernels of the others found no
            room on the device; None for all.
        objects: Where collectives of Python objects, which make the host wait, are refused: "setup" inside `step()`,
            "refuse" everywhere, "allow" nowhere.
        connect: Where the first operation of a communicator is refused, for which NCCL lets the hosts of all its ranks
            meet: "setup" inside `step()` and `no_first_use()`, "allow" nowhere. Messages between two ranks have a
            communicator of their own for each pair, unless they are a batch.
        links: What joins the ranks, for virtual time; None: none is reckoned.
        compute: What operators take, for virtual time; None: nothing.
        sums: The order in which the ranks' numbers are added: "rank order", or "halves", a tree, which shows what
            depends on the order.
        alike: How many neighbouring ranks each process stands for, as if they all did what it does at the same times.
            The world has that many times as many ranks as processes, and process p is rank p * alike. Virtual time is
            then that of the whole world, while sums and gathered tensors are those of that many copies.

    Raises:
        ValueError: A value is out of its range.
    """

    complete: Complete = "late"
    draw: int = 0
    slots: int | None = None
    objects: Objects = "setup"
    connect: Connect = "setup"
    links: Links | None = None
    compute: Compute | None = None
    sums: Sums = "rank order"
    alike: int = 1

    def __post_init__(self) -> None:
        for name, kinds in (
            ("complete", get_args(Complete)),
            ("objects", get_args(Objects)),
            ("connect", get_args(Connect)),
            ("sums", get_args(Sums)),
        ):
            if (value := getattr(self, name)) not in kinds:
                raise ValueError(f"Strict({name}={value!r}): give one of {', '.join(map(repr, kinds))}")
        if self.draw and self.complete != "drawn":
            raise ValueError(f'Strict(draw={self.draw}) draws nothing with complete="{self.complete}"; give "drawn"')
        if self.compute is not None and self.links is None:
            raise ValueError(f"Strict(compute={self.compute}) reckons no time without links; give links=Links()")
        if self.alike < 1:
            raise ValueError(f"Strict(alike={self.alike}): a process stands for at least 1 rank, itself")
        if self.slots is not None and self.slots < 1:
            raise ValueError(
                f"Strict(slots={self.slots}): at least 1 communicator must be able to run, or None for all"
            )
