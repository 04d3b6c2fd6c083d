"""Memory tiers, and the policy that assigns optimizer state, parameters and gradients to them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, Literal

from par_groups import format_bytes, parse_size

TIERS = ("device", "host", "disk")
"""Tiers from the fastest to the largest: the computing device, the memory of its host, a disk of the host."""

Parts = str | float | Mapping[str, float]
"""A tier; "auto"; the fraction from 0 to 1 on the host; or fractions by tier, with the rest on the device."""

Budget = int | str | Mapping[str, int | str]
"""Bytes that one rank may use: of the device, or of each tier."""

_TIERS_ARE = "it can be 'device', 'host', 'disk', a part from 0 to 1, a mapping of tiers, or 'auto'"

_AUTO = ("optimizer", "gradients", "parameters")
"""Options that may be "auto". What moves the fewest bytes in a step is offloaded first."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """Tiers of a chunk's parameters and reduced gradients between passes.

    Args:
        parameters: "device", "host" or "disk".
        gradients: "device", "host" or "disk".
    """

    parameters: str = "device"
    gradients: str = "device"

    @property
    def is_on_disk(self) -> bool:
        """Whether parameters or gradients are on a disk."""
        return "disk" in (self.parameters, self.gradients)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Tiers of optimizer state, parameters and gradients, for `shard`.

    On a CPU, "device" and "host" are the same memory: data of the host tier is counted separately and never moves. On
    an accelerator, `optimizer` may be offloaded, to pinned memory of the host or to a disk. The optimizer then steps
    copies of the parameters on the host, and the gradients follow it there: the device sends gradients as they are
    reduced, and receives updated parameters. `parameters` may be offloaded to the host if all of the optimizer is
    offloaded; it then steps them there. `gradients` must be "device".

    Args:
        optimizer: Tier of the optimizer's state: "device", "host" or "disk"; a fraction from 0 to 1 on the host; or
            fractions by tier, such as {"host": 0.4, "disk": 0.3}, with the rest on the device. State of the modules
            that run first stays nearest. "auto": `shard` offloads as little as the budget of the device requires, first
            to the host as far as its budget allows, then to the disk.
        parameters: Tier of this rank's shards at stage 3, from which units are gathered, in the same forms. All
            parameters of a unit are in one tier.
        gradients: Tier of reduced gradients at stage 3 until the step, in the same forms. All gradients of a unit are
            in one tier.
        path: Folder on a local disk. Each rank creates one file there without a name, which disappears with the
            process, however it ends.
        piece: Bytes of each slot, such as Adam's "exp_avg", that are read, stepped and written together: a number, or a
            text such as "16MiB".
        ahead: Number of pieces in memory: one piece is stepped while other pieces are read or written.
        threads: Number of threads that read, and of threads that write.
        overlap: Whether a step returns when it has stepped what is on the device. A thread then steps the other pieces
            during the next forward, whose reads of parameters wait for their pieces. No gradient is stale and no
            result changes, but step post hooks see the old parameters. On a CPU it requires stage 3. "auto": True,
            except on a CPU, where the thread would compete with the forward. "backward", on an accelerator: the thread
            steps each piece during backward, as soon as its gradient is reduced. You then call `step` once after each
            backward that is not within `no_sync`, and change neither gradients nor settings in between; gradients
            cannot be read, so nothing clips them. A backward that raises leaves some parameters updated.
        budget: Bytes of each tier that one rank may use, such as {"device": "80GB", "host": "100GB", "disk": "1TB"}, or
            "80GB" for the device only; on a CPU, bytes of memory. `shard` raises an error if the data does not fit. A
            budget of the device requires stage 3 or a value "auto". At stage 3 each step is recorded, and the next
            steps keep those units gathered for which `place` finds memory. None: a unit is freed when the next begins.
        policy: Name of the policy of `place`.
        other: Function that returns the bytes on the device that are neither parameters, gradients nor state, such as
            activations; it is called at each moment of a step. None: the allocator's count on an accelerator, and 0 on
            a CPU or if a value is "auto", because "auto" leaves no memory for activations.

    Raises:
        TypeError: A value of another type.
        ValueError: A value that is not allowed.
    """

    optimizer: Parts = "device"
    parameters: Parts = "device"
    gradients: Parts = "device"
    path: str | PathLike[str] | None = None
    piece: int | str = "16MiB"
    ahead: int = 4
    threads: int = 2
    overlap: bool | Literal["auto", "backward"] = "auto"
    budget: Budget | None = None
    policy: str = "next_use"
    other: Callable[[], int] | None = None

    def __post_init__(self) -> None:
        if self.auto and "device" not in self.budgets:
            raise ValueError(
                f"{self.auto[0]} is 'auto', as little as the budget of the device asks for, and budget is "
                f"{self.budget!r}; give that of the device, such as budget={{'device': '80GB', 'host': '100GB'}}"
            )
        uses_disk = self.uses_disk
        if self.path is not None and not isinstance(self.path, str | PathLike):
            raise TypeError(f"path is {self.path!r}; give a folder on a local disk")
        if uses_disk and self.path is None:
            raise ValueError(f"path is {self.path!r}, but the disk needs a path; give a folder on a local disk")
        for name, value in (("ahead", self.ahead), ("threads", self.threads)):
            if type(value) is not int:
                raise TypeError(f"{name} is {value!r}; give a whole number, such as {getattr(Offload, name)}")
            if value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        if not isinstance(self.overlap, bool) and self.overlap not in ("auto", "backward"):
            raise TypeError(f"overlap={self.overlap!r}: pass True, False, 'auto' or 'backward'")
        # Both properties raise an error for a wrong value.
        _ = self.piece_bytes, self.budgets
        if not isinstance(self.policy, str):
            raise TypeError(f"policy is {self.policy!r}; give the name of a policy, such as 'next_use'")
        if self.other is not None and not callable(self.other):
            raise TypeError(f"other is {self.other!r}; give a function that returns bytes, or None")

    def is_late(self, *, is_on_cpu: bool) -> bool:
        """Return whether pieces are stepped after the optimizer's own step has returned."""
        # On a CPU, a thread would compete with the forward.
        return self.overlap in (True, "backward") or (self.overlap == "auto" and not is_on_cpu)

    @property
    def fractions(self) -> dict[str, dict[str, float]]:
        """Fraction of the optimizer's state, of gradients and of parameters in each tier; each sum is 1."""
        return {name: _fractions_of(name, getattr(self, name)) for name in _AUTO}

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the options whose data is, or may be, offloaded from the device."""
        return tuple(name for name, by_tier in self.furthest.fractions.items() if by_tier["device"] < 1)

    @property
    def uses_disk(self) -> bool:
        """Whether any data is on a disk, or may be."""
        return any(by_tier["disk"] for by_tier in self.furthest.fractions.values())

    @property
    def auto(self) -> tuple[str, ...]:
        """Names of the options that are "auto", in the order in which their data is offloaded."""
        return tuple(name for name in _AUTO if getattr(self, name) == "auto")

    @property
    def furthest(self) -> "Offload":
        """The same options, with "auto" replaced by the last tier that has a budget."""
        last = next((tier for tier in ("disk", "host") if self.budgets.get(tier)), "device")
        resolved: dict[str, Any] = dict.fromkeys(self.auto, last)
        return replace(self, **resolved) if resolved else self

    @property
    def piece_bytes(self) -> int:
        """Bytes of each slot that are moved together."""
        size = parse_size(self.piece, name="piece", example="16MiB")
        if size < 1:
            raise ValueError(f"piece is {self.piece!r}; give 1 byte or more")
        return size

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes that one rank may use, for each tier with a budget."""
        return {} if self.budget is None else bytes_by_tier(self.budget)

    @property
    def folder(self) -> str:
        """The path as text; "" without a path."""
        return "" if self.path is None else fspath(self.path)


def _fractions_of(name: str, given: object) -> dict[str, float]:
    """Return the fraction of some data in each tier; the sum is 1.

    Args:
        name: Name of the option, for errors.
        given: A tier, a fraction or a mapping.

    Raises:
        TypeError: `given` is something else.
        ValueError: Another tier, fractions outside of 0 to 1, or "auto", which `shard` has not resolved yet.
    """
    remedy = _TIERS_ARE
    if given == "auto":
        raise ValueError(f"{name} is 'auto', which becomes parts of tiers in shard(); give parts to ask about")
    if isinstance(given, str):
        if given not in TIERS:
            raise ValueError(f"{name} is {given!r}; {remedy}")
        return {tier: float(tier == given) for tier in TIERS}
    mapping: Mapping[str, Any] = given if isinstance(given, Mapping) else {"host": given}
    for tier, part in mapping.items():
        # True is an int, but no fraction.
        if isinstance(part, bool) or not isinstance(part, int | float):
            raise TypeError(f"{name} is {given!r}; {remedy}")
        if tier not in TIERS or not 0 <= part <= 1:
            raise ValueError(f"{name} is {given!r}; {remedy}")
    offloaded = {tier: float(mapping.get(tier, 0)) for tier in ("host", "disk")}
    total = sum(mapping.values())
    # A sum of fractions may exceed 1 by rounding.
    if total > 1 + 1e-9:
        raise ValueError(f"{name} is {given!r}, parts whose sum is {total:g}; give parts whose sum is 1 or less")
    if "device" in mapping and not math.isclose(total, 1):
        raise ValueError(
            f"{name} is {given!r}, parts of all tiers whose sum is {total:g}; leave the device out, which has the "
            "rest, or give parts whose sum is 1"
        )
    return {"device": max(0.0, 1 - offloaded["host"] - offloaded["disk"]), **offloaded}


def bytes_by_tier(budget: Budget) -> dict[str, int]:
    """Return the bytes of a budget by tier, from the fastest tier to the largest.

    Args:
        budget: Bytes of the device, or bytes by tier.

    Raises:
        TypeError: The budget has another type.
        ValueError: A tier is unknown, or a text is not a size.
    """
    given = budget if isinstance(budget, Mapping) else {"device": budget}
    for tier in given:
        if tier not in TIERS:
            raise ValueError(f"budget has {tier!r}; it can have {', '.join(TIERS)}")
    names = {tier: f"budget[{tier!r}]" if given is budget else "budget" for tier in given}
    return {tier: parse_size(given[tier], name=names[tier], example="80GB") for tier in TIERS if tier in given}


def least_in_words(tier: str, given: int, parts: Mapping[str, int]) -> str:
    """Return a text such as "the budget of the device is 2.0 GB, and 2.6 GB are the least: parameters 2.6".

    Args:
        tier: Tier.
        given: Budget of the tier, in bytes.
        parts: Bytes that the tier must hold, by kind.
    """
    total = format_bytes(sum(parts.values()))
    factor = parse_size(f"1{total.split()[1]}")
    sizes = {name: f"{size / factor:.{int(factor > 1)}f}" for name, size in parts.items()}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items() if float(size))
    return f"the budget of the {tier} is {format_bytes(given)}, and {total} are the least: {said}"
