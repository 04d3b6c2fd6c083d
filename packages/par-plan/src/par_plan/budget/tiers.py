"""Fractions of state to offload, in closed form, from the bytes that are missing on the device.

device     all of it, less what is missing
host       takes what is missing, as far as it has room
disk       takes the rest
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from par_groups import format_bytes

AWAY = ("host", "disk")
"""Where bytes go that the device has no room for, the quicker first."""

_NOTHING = 1e-9
"""Parts below it are what rounding leaves."""


@dataclass(frozen=True, kw_only=True)
class Offloadable:
    """State that can be offloaded, fully or in part.

    Args:
        name: "optimizer" or "parameters".
        frees: Device memory that becomes free when all of the state is offloaded, in bytes.
        takes: Memory that all of the state needs on each other tier, in bytes; inf if it cannot be on the tier.
        beside: Further bytes of host memory if all of it is offloaded to any tier, such as gradients for the host's
            step.
        grain: Bytes of the largest indivisible part; 0 means that any fraction is possible.
    """

    name: str
    frees: float
    takes: Mapping[str, float]
    beside: float = 0.0
    grain: float = 0.0

    @property
    def uneven(self) -> float:
        """Largest difference between requested and offloaded fraction, since a part goes where its middle belongs."""
        return self.grain / self.frees / 2 if self.frees else 0.0

    def surely(self, part: float) -> float:
        """Return the smallest offloaded fraction for a requested one."""
        return part if part >= 1 else max(0.0, part - self.uneven)


def called(names: Iterable[str]) -> str:
    """Return names of sources for error messages, such as "the optimizer's state and the parameters"."""
    words = {"optimizer": "the optimizer's state", "parameters": "the parameters"}
    return " and ".join(words[name] for name in names)


@dataclass(frozen=True, kw_only=True)
class TierFractions:
    """Offloaded fraction of each source, by tier.

    Args:
        parts: Fraction of each source on each tier of `AWAY`, from 0 to 1, by name of the source.
        bytes: Size on each of these tiers, in bytes.
    """

    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(AWAY, 0.0))

    def part(self, name: str) -> float:
        """Return the offloaded fraction of a source, from 0 to 1."""
        return sum(self.parts.get(name, {}).values())

    def describe(self) -> str:
        """Return the offloaded fractions as text, such as "opt 60% host, param 20% host", or "-"."""
        short = {"optimizer": "opt", "parameters": "param"}
        words = [
            f"{short.get(name, name)} " + ", ".join(f"{part:.0%} {tier}" for tier, part in parts.items() if part)
            for name, parts in self.parts.items()
            if any(parts.values())
        ]
        return ", ".join(words) or "-"


class TooSmallError(ValueError):
    """A memory tier is too small for the state that it must store.

    Args:
        tier: Name of the tier: "device", or the last configured tier if offloaded state does not fit.
        missing: Bytes by which the tier is too small.
        text: The message.
        parts: Bytes that the tier must store, by name, such as "gradients".
    """

    def __init__(self, tier: str, missing: float, text: str, parts: Mapping[str, float] | None = None) -> None:
        super().__init__(text)
        self.tier, self.missing, self.parts = tier, missing, dict(parts or {})


def offload_missing(missing: float, sources: Sequence[Offloadable], rooms: Mapping[str, float]) -> TierFractions:
    """Return fractions that offload the missing bytes: the first source first, to the fastest tier with capacity.

    Args:
        missing: Bytes that the device has too few of, with everything on it; 0 or less: it has room.
        sources: State that can be offloaded, in this order.
        rooms: Bytes of the tiers in `AWAY` that may be taken.

    Raises:
        TooSmallError: The state does not fit on the device with all sources offloaded, or offloaded state fits on no
            tier.
    """
    beyond = missing - sum(source.frees for source in sources)
    if beyond > _NOTHING * abs(missing):
        raise TooSmallError("device", beyond, f"the device is short of {format_bytes(beyond)}, with all else away")
    parts: dict[str, dict[str, float]] = {}
    left = dict.fromkeys(AWAY, 0.0) | dict(rooms)
    taken = dict.fromkeys(AWAY, 0.0)
    for source in sources:
        if missing <= _NOTHING * source.frees or source.frees <= 0:
            continue
        # Indivisible parts may free less than the fraction asks for, so it is rounded up by half a part.
        part = min(1.0, missing / source.frees + source.uneven)
        missing -= part * source.frees
        parts[source.name] = {}
        beside = part * source.beside
        for tier in AWAY:
            size = source.takes[tier]
            # Gradients and copies for the step stay on the host, even for state that is on the disk.
            room = left[tier] - (beside if tier == "host" else 0)
            # Half a part less than the tier could store, because a part that crosses the border may land on either
            # side.
            here = part if size * part <= room else max(0.0, room / size - source.uneven)
            if here > 0:
                parts[source.name][tier] = here
                part -= here
                left[tier] -= here * size
                taken[tier] += here * size
        left["host"] -= beside
        taken["host"] += beside
        if part > _NOTHING or left["host"] < -_NOTHING * source.frees:
            there = {each.name: parts[each.name] for each in sources if each.name in parts}
            raise _no_room(sources, there, part, left, rooms)
    return TierFractions(parts=parts, bytes=taken)


def _no_room(
    sources: Sequence[Offloadable],
    parts: Mapping[str, Mapping[str, float]],
    part: float,
    left: Mapping[str, float],
    rooms: Mapping[str, float],
) -> TooSmallError:
    """Return the error for a part of the last source in `parts` that fits on no tier.

    The last tier that has any room at all is short.
    """
    by_name = {source.name: source for source in sources}
    source = by_name[list(parts)[-1]]
    # The message names the last tier that could have stored more, because raising its budget helps.
    possible = [tier for tier in AWAY if rooms.get(tier, 0) > 0 and math.isfinite(source.takes[tier])]
    tier = possible[-1] if possible else "host"
    tier = "host" if left["host"] < -_NOTHING * source.frees else tier
    missing = part * source.takes[tier] + max(0.0, -left["host"])
    have = ", ".join(f"the {tier} has {format_bytes(rooms.get(tier, 0))}" for tier in AWAY)
    text = f"the {tier} is short of {format_bytes(missing)} for what the device has no room for: {have}"
    there = {name: found.get(tier, 0.0) * by_name[name].takes[tier] for name, found in parts.items()}
    if tier == "host":
        there |= {name: size + sum(parts[name].values()) * by_name[name].beside for name, size in there.items()}
    there[source.name] += part * source.takes[tier]
    return TooSmallError(tier, missing, text, there)


def most_away(sources: Sequence[Offloadable], rooms: Mapping[str, float]) -> float:
    """Return the device bytes that are freed if host and disk are filled, the first source first.

    For a fraction p, the host stores `p * beside`, and both tiers together store `p * takes`.

    Args:
        sources: State that can be offloaded, in this order.
        rooms: Bytes of the tiers in `AWAY` that may be taken.
    """
    freed = 0.0
    left = dict.fromkeys(AWAY, 0.0) | dict(rooms)
    for source in sources:
        part = 1.0
        # The state is limited by what both tiers can store, and by what each part needs on the host besides.
        for room, size in (
            (sum(left[tier] / source.takes[tier] if source.takes[tier] else math.inf for tier in AWAY), 1.0),
            (left["host"], source.beside),
        ):
            part = min(part, room / size) if size else part
        if source.beside and source.takes["host"]:
            # The host stores `beside` in any case, and the disk takes over state that then does not fit on the host.
            both = left["host"] + left["disk"] * source.takes["host"] / source.takes["disk"]
            part = min(part, both / (source.takes["host"] + source.beside))
        freed += part * source.frees
        if part < 1:
            break
        taken = offload_missing(source.frees, [source], left).bytes
        left = {tier: room - taken[tier] for tier, room in left.items()}
    return freed
