"""What the device has no room for, and where it goes instead: parts in closed form, from what is missing.

device     all of it, less what is missing
host       takes what is missing, as far as it has room
disk       takes the rest
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .._units import format_bytes

AWAY = ("host", "disk")
"""Where bytes go that the device has no room for, the quicker first."""

_NOTHING = 1e-9
"""Parts below it are what rounding leaves."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Something that may leave the device, whole or a part of it.

    Args:
        name: What it is: "optimizer" or "parameters".
        frees: Bytes that the device has more of when all of it is away.
        takes: Bytes that all of it takes elsewhere, by tier.
        beside: Bytes that it takes on the host when all of it is away, wherever that is, such as gradients that a
            host steps by.
    """

    name: str
    frees: float
    takes: Mapping[str, float]
    beside: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Which part of each source lies away from the device.

    Args:
        parts: By name of a source, the part of it in each tier of `AWAY`.
        bytes: Bytes in each of these tiers.
    """

    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    bytes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(AWAY, 0.0))

    def part(self, name: str) -> float:
        """The part of a source that is away, from 0 to 1."""
        return sum(self.parts.get(name, {}).values())

    def describe(self) -> str:
        """What is away, such as "opt 60% host, 10% disk"; "-" if nothing is."""
        short = {"optimizer": "opt", "parameters": "param"}
        words = [
            f"{short.get(name, name)} " + ", ".join(f"{part:.0%} {tier}" for tier, part in parts.items() if part)
            for name, parts in self.parts.items()
            if any(parts.values())
        ]
        return "; ".join(words) or "-"


class TooSmallError(ValueError):
    """A tier is too small.

    Args:
        tier: Which one: "device", or, if what is away has too little room, the last of the tiers that there are.
        missing: Bytes that it lacks.
        text: The message.
    """

    def __init__(self, tier: str, missing: float, text: str) -> None:
        super().__init__(text)
        self.tier, self.missing = tier, missing


def share_out(missing: float, sources: Sequence[Source], rooms: Mapping[str, float]) -> Shares:
    """Moves as much of the sources as is missing on the device, the first source first, to the quickest tier with room.

    Args:
        missing: Bytes that the device has too few of, with everything on it; 0 or less: it has room.
        sources: What may leave it, in the order in which it does.
        rooms: Bytes of the tiers in `AWAY` that may be taken.

    Raises:
        TooSmallError: The device lacks room even if all of the sources are away; or what is to be away has no room.
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
        part = min(1.0, missing / source.frees)
        missing -= part * source.frees
        parts[source.name] = {}
        beside = part * source.beside
        for tier in AWAY:
            size = source.takes[tier]
            room = left[tier] - (beside if tier == "host" else 0)
            here = part if size <= 0 else max(0.0, min(part, room / size))
            if here > 0:
                parts[source.name][tier] = here
                part -= here
                left[tier] -= here * size
                taken[tier] += here * size
        left["host"] -= beside
        taken["host"] += beside
        if part > _NOTHING or left["host"] < -_NOTHING * source.frees:
            raise _no_room(source, part, left, rooms)
    return Shares(parts=parts, bytes=taken)


def _no_room(source: Source, part: float, left: Mapping[str, float], rooms: Mapping[str, float]) -> TooSmallError:
    """The error for a part that no tier has room for: the last tier that has any room at all is short."""
    tier = next((tier for tier in reversed(AWAY) if rooms.get(tier, 0) > 0), "host")
    tier = "host" if left["host"] < -_NOTHING * source.frees else tier
    missing = part * source.takes[tier] + max(0.0, -left["host"])
    have = ", ".join(f"the {tier} has {format_bytes(rooms.get(tier, 0))}" for tier in AWAY)
    return TooSmallError(
        tier, missing, f"the {tier} is short of {format_bytes(missing)} for what the device has no room for: {have}"
    )
