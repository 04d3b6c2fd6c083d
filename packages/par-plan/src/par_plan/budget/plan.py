"""Byte budgets for device, host and disk, and the decision within them before the model is sharded.

Step 1 offloads all optimizer state that fits on the host or the disk, and layers save their inputs only. This step
measures the layers and the disk. From step 2 on, free device memory goes to the activations and the state that save
most seconds per byte.

State can return from the disk, but cannot leave the device later. Therefore the first step offloads as much as
possible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any

from par_groups import format_bytes, parse_size

from .tiers import Offloadable, TierFractions, TooSmallError, called, most_away, offload_missing

ACTIVATIONS = 0.25
"""Part of a device's budget that is left for activations, where there is room elsewhere and nothing is measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one rank in each tier.

    Args:
        device: Bytes of device memory for parameters, gradients, state and activations; on a CPU, of main memory.
        host: Bytes of host memory for offloaded state; 0 disables it.
        disk: Bytes of disk for offloaded state; 0 disables it.
        path: A folder on that disk.
        activations: Bytes of device memory to reserve for activations; None reserves a quarter if host and disk have
            the capacity.
    """

    device: float
    host: float = 0.0
    disk: float = 0.0
    path: str | None = None
    activations: float | None = None


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """Decision within a budget. Its text explains each choice.

    Args:
        budget: The budget.
        shares: Offloaded fraction of each kind of state, by tier.
        kinds: Bytes of device memory by kind: persistent state, and buffers for reductions and gathers.
        reasons: A sentence for each choice.
        step: Bytes of the device beside `state` while the optimizer steps, when activations are free: gradients in its
            dtype.
        later: Bytes of `kinds` that the device needs only from the second step on, such as a prefetched unit.
        is_open: Whether the rest is spent when the first step was measured.
        recalled: Bytes of state that have come back from the disk then.
    """

    budget: Budget
    shares: TierFractions
    kinds: Mapping[str, float]
    reasons: tuple[str, ...]
    step: float = 0.0
    later: float = 0.0
    is_open: bool = False
    recalled: float = 0.0

    @property
    def state(self) -> float:
        """Bytes of the device that activations cannot have."""
        return sum(self.kinds.values()) + self.recalled

    @property
    def activations(self) -> int:
        """Bytes that activations may take."""
        return int(max(0.0, self.budget.device - self.state))

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def read_budget(given: object) -> Budget | None:
    """Return the budget that a mapping describes.

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
        return float(parse_size(value, name=name, example="80GB"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} is {value!r}; give bytes, or a text such as '80GB'")
    return float(value)


def place_within(
    kinds: Mapping[str, float], sources: Sequence[Offloadable], budget: Budget, *, measures: bool, step: float = 0.0
) -> BudgetPlan:
    """Return the fractions to offload, in closed form.

    If the first step will be measured, all optimizer state that fits elsewhere is offloaded. Otherwise only the missing
    bytes are offloaded, as with parameters.

    Args:
        kinds: Bytes on the device by kind, before offloading; a source reduces the kind of its name.
        sources: State that can be offloaded, the optimizer's state first.
        budget: Bytes of each tier.
        measures: Whether the first step will be measured, so that state can come back.
        step: Bytes on the device beside `kinds` while the optimizer steps, when activations are free.

    Raises:
        TooSmallError: A tier is too small; the message says which, and what the least is.
    """
    rooms = {"host": budget.host, "disk": budget.disk}
    missing = sum(kinds.values()) - budget.device
    # Activations are free before the optimizer steps, so the larger of both needs the memory.
    must = missing + max(budget.activations or 0.0, step)
    wanted = max(must, missing + (ACTIVATIONS * budget.device if budget.activations is None else budget.activations))
    # State can return after the measured step but cannot leave later, so the first step begins with all of it away.
    if measures:
        wanted = max(wanted, sources[0].frees)
    try:
        # Only `must` may fail for lack of room; what is wanted beyond is taken as far as the other tiers have room.
        shares = offload_missing(max(must, min(wanted, most_away(sources, rooms))), sources, rooms)
    except TooSmallError as error:
        raise _refusal(error, kinds, sources, budget, step) from None
    spent = BudgetPlan(
        budget=budget,
        shares=shares,
        kinds=_staying(kinds, sources, shares.part),
        reasons=(),
        step=step,
        is_open=measures,
    )
    return replace(spent, reasons=_reasons(spent, kinds))


def _staying(
    kinds: Mapping[str, float], sources: Sequence[Offloadable], part: Callable[[str], float]
) -> dict[str, float]:
    """Return the remaining device bytes by kind; gradients follow the optimizer's state.

    A unit that crosses the border between tiers stays in one tier, so the offloaded fraction may be smaller.
    """
    left = dict(kinds)
    for source in sources:
        # A source may free more than its own kind: on an accelerator, gradients follow the optimizer to the host.
        own, away = min(source.frees, kinds[source.name]), source.surely(part(source.name))
        left[source.name] -= away * own
        left["gradients"] -= away * (source.frees - own)
    return {kind: max(0.0, size) for kind, size in left.items()}


def _refusal(
    error: TooSmallError, kinds: Mapping[str, float], sources: Sequence[Offloadable], budget: Budget, step: float
) -> TooSmallError:
    """Return the error with the minimum of the tier that is too small."""
    alone = not budget.host and not budget.disk
    if alone or error.tier == "device":
        parts = _staying(kinds, sources, lambda _: 0.0 if alone else 1.0)
        needs = {"activations": budget.activations or 0.0, "gradients of the step": step}
        # Activations and the gradients of the step are never in memory at the same time.
        most = max(needs, key=lambda kind: needs[kind])
        parts[most] = needs[most]
        words = least_in_words("device", budget.device, parts)
        elsewhere = (
            f"raise it, or give bytes of a host or a disk, where {called(source.name for source in sources)} may lie"
        )
        remedy = elsewhere if alone else "raise it"
        return TooSmallError("device", sum(parts.values()) - budget.device, f"{words}; {remedy}")
    given = budget.host if error.tier == "host" else budget.disk
    words = least_in_words(error.tier, given, error.parts)
    return TooSmallError(
        error.tier, error.missing, f"{words}, for which the device has no room; raise it, or that of the device"
    )


def least_in_words(tier: str, given: float, parts: Mapping[str, float]) -> str:
    """Return the minimum of a tier as text, with its parts.

    Args:
        tier: Name of the tier.
        given: Budget of the tier, in bytes.
        parts: Bytes that must be stored on the tier, by description.
    """
    least = sum(parts.values())
    return (
        f"the budget of the {tier} is {format_bytes(given)}, and {format_bytes(least)} are the least: {in_parts(parts)}"
    )


def in_parts(parts: Mapping[str, float]) -> str:
    """Return bytes by kind as text in the unit of their sum, such as "parameters 1.2, gradients 0.5"."""
    number, unit = format_bytes(sum(parts.values())).split()
    digits = 1 if "." in number else 0
    size = parse_size(f"1{unit}")
    told = {kind: f"{part / size:,.{digits}f}" for kind, part in parts.items()}
    return ", ".join(f"{kind} {text}" for kind, text in told.items() if float(text.replace(",", "")))


def _reasons(spent: BudgetPlan, kinds: Mapping[str, float]) -> tuple[str, ...]:
    budget, shares = spent.budget, spent.shares
    everything, stays = sum(kinds.values()), sum(spent.kinds.values())
    device = f"device {format_bytes(budget.device)}"
    if everything - stays <= 0:
        reasons = [f"{device}: stores all {format_bytes(everything)} of state ({in_parts(kinds)})."]
    else:
        why = (
            "until the first step is measured, all state that the other tiers can store is offloaded"
            if spent.is_open
            else f"the rest is offloaded, to leave {format_bytes(spent.activations)} for activations"
        )
        reasons = [
            f"{device}: stores {format_bytes(stays)} of {format_bytes(everything)} of state "
            f"({in_parts(spent.kinds)}); {why}: {shares.describe()}."
        ]
    for tier, given in (("host", budget.host), ("disk", budget.disk)):
        if shares.bytes[tier]:
            full = ", and is full" if tier == "host" and shares.bytes["disk"] else ""
            reasons.append(f"{tier} {format_bytes(given)}: stores {format_bytes(shares.bytes[tier])} of state{full}.")
    left = f"activations: {format_bytes(spent.activations)} remain"
    if spent.is_open:
        reasons.append(f"{left}; in the first step, layers save only their inputs.")
    else:
        reasons.append(f"{left} for what layers save for backward.")
    return tuple(reasons)
