"""One number for each tier of memory, and what is chosen within them before anything is wired.

device     state that stays | activations, as many as have room
host       state that has no room on the device, as far as it has room
disk       the rest of it
"""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from .._units import format_bytes, parse_bytes
from .tiers import Shares, Source, TooSmallError, share_out

ACTIVATIONS = 0.25
"""Part of a device's budget that is left for activations where nobody says how many bytes they take."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one rank in each tier.

    Args:
        device: Of the device: parameters, gradients, state, and activations. On a CPU, of its memory.
        host: Of the host, beside the device; 0: nothing lies there.
        disk: Of a disk; 0: nothing lies there.
        path: A folder on that disk.
        activations: Bytes of the device that are left for activations when it is chosen what lies elsewhere; None: a
            quarter of them. Whatever state leaves free is theirs, too.
    """

    device: float
    host: float = 0.0
    disk: float = 0.0
    path: str | None = None
    activations: float | None = None

    @property
    def least_activations(self) -> float:
        """Bytes that are left for activations."""
        return ACTIVATIONS * self.device if self.activations is None else self.activations


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What was chosen within a budget; printed, with the reason of each choice.

    Args:
        budget: The budget.
        shares: Which part of the optimizer's state lies where.
        state: Bytes of the device that stay from step to step, and those in which gradients are reduced.
        reasons: A sentence for each choice.
    """

    budget: Budget
    shares: Shares
    state: float
    reasons: tuple[str, ...]

    @property
    def activations(self) -> int:
        """Bytes that activations may take."""
        return int(max(0.0, self.budget.device - self.state))

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def budget_of(given: object) -> Budget | None:
    """The budget that a mapping says.

    Args:
        given: A mapping such as {"device": "80GB", "host": "200GB", "disk": "1TB", "path": "/scratch"}, with sizes as
            texts or as numbers of bytes; None: there is none.

    Raises:
        TypeError: It is no mapping, or has another key.
        ValueError: A size is none, or there is a disk without a path.
    """
    if given is None:
        return None
    keys = list(Budget.__dataclass_fields__)
    if not isinstance(given, Mapping):
        raise TypeError(f"memory is {given!r}; give a mapping of {', '.join(keys)}, or None")
    for key in given:
        if key not in keys:
            raise TypeError(f"memory has {key!r}; it can have {', '.join(keys)}")
    sizes: dict[str, Any] = {
        key: _size(f"memory[{key!r}]", value) for key, value in given.items() if key != "path" and value is not None
    }
    if not sizes.get("device"):
        raise ValueError(f"memory is {dict(given)}, without the device's; give its bytes, such as device='80GB'")
    path = given.get("path")
    if path is not None and not isinstance(path, str | PathLike):
        raise TypeError(f"memory['path'] is {path!r}; give a folder on a local disk")
    if sizes.get("disk") and not path:
        raise ValueError(f"memory['path'] is {path!r}, but the disk needs a path; give a folder on a local disk")
    return Budget(**sizes, path=None if not path else fspath(path))


def _size(name: str, value: object) -> float:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} is {value!r}; give bytes, or a text such as '80GB'")
    return float(value)


def choose(kinds: Mapping[str, float], optimizer: Source, budget: Budget) -> Spent:
    """What lies where, in closed form: as much of the optimizer's state leaves the device as is missing there.

    Args:
        kinds: Bytes on the device by what they are, if nothing leaves it.
        optimizer: What may leave it.
        budget: Bytes of each tier.

    Raises:
        TooSmallError: A tier is too small; the message says which, and by how much.
    """
    everything, left_free = sum(kinds.values()), budget.least_activations
    try:
        missing = everything + left_free - budget.device
        shares = share_out(missing, [optimizer], {"host": budget.host, "disk": budget.disk})
    except TooSmallError as error:
        least = everything - optimizer.frees + left_free
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items() if size)
        if error.tier == "device":
            raise TooSmallError(
                "device",
                error.missing,
                f"the budget of the device is {format_bytes(budget.device)}, and {format_bytes(least)} are the least, "
                f"with {format_bytes(left_free)} for activations and the optimizer's state elsewhere ({parts}); raise "
                "it, or share parameters and gradients by a higher stage of zero",
            ) from None
        raise TooSmallError(
            error.tier,
            error.missing,
            f"the device has no room for {format_bytes(missing)} of {format_bytes(everything)} ({parts}) and "
            f"{format_bytes(left_free)} for activations, and {error}; raise the budget of the {error.tier}",
        ) from None
    state = everything - shares.part(optimizer.name) * optimizer.frees
    spent = Spent(budget=budget, shares=shares, state=state, reasons=())
    return Spent(budget=budget, shares=shares, state=state, reasons=_reasons(spent, missing, everything))


def _reasons(spent: Spent, missing: float, everything: float) -> tuple[str, ...]:
    budget, shares = spent.budget, spent.shares
    device = f"device {format_bytes(budget.device)}"
    if missing <= 0:
        first = f"{device}: all state stays there, {format_bytes(everything)}."
    else:
        first = (
            f"{device}: of {format_bytes(everything)} of state, {format_bytes(missing)} have no room beside "
            f"{format_bytes(budget.least_activations)} for activations: {shares.describe()}."
        )
    reasons = [first]
    for tier, given in (("host", budget.host), ("disk", budget.disk)):
        if shares.bytes[tier]:
            full = "is full, the rest goes on" if tier == "host" and shares.bytes["disk"] else "has room"
            reasons.append(f"{tier} {format_bytes(given)}: {full}; {format_bytes(shares.bytes[tier])} lie there.")
    reasons.append(f"activations: {format_bytes(spent.activations)} are left for what layers keep for backward.")
    return tuple(reasons)
