"""Where an optimizer's state may lie, and which part of it lies where."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, Literal

from par_groups import parse_size

TIERS = ("device", "host", "disk")
"""From the quickest to the largest: what computes, the memory of its host, and a disk of the host."""

Parts = str | float | Mapping[str, float]
"""A tier; "auto"; the part from 0 to 1 that lies on the host; or parts by tier, and the rest on the device."""

Budget = int | str | Mapping[str, int | str]
"""Bytes of the device that one rank may take; or those of each tier."""

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}

_TIERS_ARE = "it can be 'device', 'host', 'disk', a part from 0 to 1, a mapping of tiers, or 'auto'"

_AUTO = ("optimizer", "gradients", "parameters")
"""What may be "auto", in the order in which it leaves the device: what moves fewest bytes in a step leaves first."""


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where a chunk's parameters, as the module uses them, and its reduced gradients lie between passes.

    Args:
        parameters: "device", "host" or "disk".
        gradients: "device", "host" or "disk".
    """

    parameters: str = "device"
    gradients: str = "device"

    @property
    def is_on_disk(self) -> bool:
        """Whether either of them lies on a disk."""
        return "disk" in (self.parameters, self.gradients)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What of an optimizer's state, of parameters and of gradients lies elsewhere than on the device, for `shard`.

    On a CPU the device and its host are one memory: what lies on the host moves nowhere, and is counted apart.

    Args:
        optimizer: Where its state lies: "device", "host" or "disk"; the part from 0 to 1 that lies on the host; or
            parts by tier, such as {"host": 0.4, "disk": 0.3}, and the rest on the device. What stays nearest is that of
            the modules that run first. "auto": as little as the budget of the device asks for lies elsewhere, on the
            host as far as its budget goes, and else on the disk.
        parameters: Where this rank's shares of units lie at stage 3, from which units are gathered, given in the same
            ways. Whole units lie in one tier.
        gradients: Where reduced gradients lie at stage 3 until the optimizer has stepped, given in the same ways. Those
            of whole units lie in one tier.
        path: A folder on a local disk. Each rank makes one file in it, which has no name, so that nothing stays behind
            however the process ends.
        piece: Bytes of each slot, such as Adam's "exp_avg", that are read, stepped and written as one: a number, or a
            text such as "16MiB".
        ahead: Number of pieces in memory: one is stepped, others are read or written meanwhile.
        threads: Number of threads that read, and of threads that write.
        overlap: Whether, at stage 3, a step returns when it has stepped what is in memory, and a thread steps what is
            on the disk while the next forward runs, in which each unit waits for its own. No gradient is stale and no
            number changes, but hooks behind a step see the parameters of before. "auto": where computing is not on a
            CPU, of which the thread would take a part.
        budget: Bytes that one rank may take, by tier, such as {"device": "80GB", "host": "100GB", "disk": "1TB"}, or
            "80GB" of the device; on a CPU, of memory. What does not fit is refused. Of the device it is for stage 3,
            or for something that is "auto". At stage 3 each step is recorded, and in the next ones those units stay
            gathered that `place` has room for. None: a unit is freed when the next begins.
        policy: The name of the policy of `place` by which they are chosen.
        other: Tells how many bytes on the device are neither parameters, nor gradients, nor state, such as activations;
            called at each moment of a step. None: what the allocator says on an accelerator, and 0 on a CPU.

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
    overlap: bool | Literal["auto"] = "auto"
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
        if not isinstance(self.overlap, bool) and self.overlap != "auto":
            raise TypeError(f"overlap is {self.overlap!r}; it can be True, False or 'auto'")
        _ = self.piece_bytes, self.budgets
        if not isinstance(self.policy, str):
            raise TypeError(f"policy is {self.policy!r}; give the name of a policy, such as 'next_use'")
        if self.other is not None and not callable(self.other):
            raise TypeError(f"other is {self.other!r}; give a function that returns bytes, or None")

    @property
    def parts(self) -> dict[str, float]:
        """Which part of the optimizer's state lies in each tier; 1 in all."""
        return _parts_of("optimizer", self.optimizer)

    @property
    def parameter_parts(self) -> dict[str, float]:
        """Which part of the parameters lies in each tier; 1 in all."""
        return _parts_of("parameters", self.parameters)

    @property
    def gradient_parts(self) -> dict[str, float]:
        """Which part of the gradients lies in each tier; 1 in all."""
        return _parts_of("gradients", self.gradients)

    @property
    def away(self) -> dict[str, Parts]:
        """What does not lie on the device alone, or may not, as it was given: by name of the option."""
        far = self.furthest
        parts = {"optimizer": far.parts, "parameters": far.parameter_parts, "gradients": far.gradient_parts}
        return {name: getattr(self, name) for name, by_tier in parts.items() if by_tier["device"] < 1}

    @property
    def uses_disk(self) -> bool:
        """Whether anything lies on a disk, or may."""
        far = self.furthest
        return any(parts["disk"] for parts in (far.parts, far.parameter_parts, far.gradient_parts))

    @property
    def auto(self) -> tuple[str, ...]:
        """What is "auto", by name of the option, in the order in which it leaves the device."""
        return tuple(name for name in _AUTO if getattr(self, name) == "auto")

    @property
    def furthest(self) -> "Offload":
        """The same, with what is "auto" in the last tier that it may go to: that has a budget."""
        last = next((tier for tier in ("disk", "host") if self.budgets.get(tier)), "device")
        return self.with_parts(dict.fromkeys(self.auto, last)) if self.auto else self

    def with_parts(self, parts: Mapping[str, Parts]) -> "Offload":
        """The same, but for what lies where of some options, by name."""
        return replace(
            self,
            optimizer=parts.get("optimizer", self.optimizer),
            parameters=parts.get("parameters", self.parameters),
            gradients=parts.get("gradients", self.gradients),
        )

    @property
    def piece_bytes(self) -> int:
        """Bytes of each slot that are moved as one."""
        size = parse_size(self.piece, name="piece", example="16MiB")
        if size < 1:
            raise ValueError(f"piece is {self.piece!r}; give 1 byte or more")
        return size

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes that one rank may take, of each tier that has a budget."""
        if self.budget is None:
            return {}
        given = self.budget if isinstance(self.budget, Mapping) else {"device": self.budget}
        for tier in given:
            if tier not in TIERS:
                raise ValueError(f"budget has {tier!r}; it can have {', '.join(TIERS)}")
        return {
            tier: parse_size(size, name="budget" if size is self.budget else f"budget[{tier!r}]", example="80GB")
            for tier, size in given.items()
        }

    @property
    def folder(self) -> str:
        """The path as a text."""
        return "" if self.path is None else fspath(self.path)


def _parts_of(name: str, given: object) -> dict[str, float]:
    """Which part of something lies in each tier; 1 in all.

    Args:
        name: What it is, for errors.
        given: A tier, a part or a mapping.

    Raises:
        TypeError: Something else.
        ValueError: Another tier, or parts that are none; "auto", of which nobody knows yet.
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
        if isinstance(part, bool) or not isinstance(part, int | float):
            raise TypeError(f"{name} is {given!r}; {remedy}")
        if tier not in TIERS or not 0 <= part <= 1:
            raise ValueError(f"{name} is {given!r}; {remedy}")
    away = {tier: float(mapping.get(tier, 0)) for tier in ("host", "disk")}
    total = sum(mapping.values())
    if total > 1 + 1e-9:
        raise ValueError(f"{name} is {given!r}, parts whose sum is {total:g}; give parts whose sum is 1 or less")
    if "device" in mapping and not math.isclose(total, 1):
        raise ValueError(
            f"{name} is {given!r}, parts of all tiers whose sum is {total:g}; leave the device out, which has the "
            "rest, or give parts whose sum is 1"
        )
    return {"device": max(0.0, 1 - away["host"] - away["disk"]), **away}


def text_of(size: int) -> str:
    """Bytes as errors say them, such as "2.0 GB"."""
    for name, unit in _UNITS.items():
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def least_in_words(tier: str, given: int, parts: Mapping[str, int]) -> str:
    """What a tier has to have, such as "the budget of the device is 2.0 GB, and 2.6 GB are the least: parameters 2.6".

    Args:
        tier: The tier.
        given: Its budget in bytes.
        parts: Bytes that have to lie there, by what they are.
    """
    least = text_of(sum(parts.values()))
    unit = least.split()[1]
    told = {name: f"{size / _UNITS.get(unit, 1):.{int(unit != 'B')}f}" for name, size in parts.items()}
    said = ", ".join(f"{name} {number}" for name, number in told.items() if float(number))
    return f"the budget of the {tier} is {text_of(given)}, and {least} are the least: {said}"
