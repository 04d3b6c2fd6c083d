"""The function `place`, which returns a placement within a budget, and checks it before any code follows it."""

from par_groups import format_bytes

from .._tiers import Budget, bytes_by_tier
from .ledger import Placement, Sizes, simulate
from .moments import Trace
from .policies import POLICIES


def place(trace: Trace, sizes: Sizes, budget: Budget, policy: str = "next_use") -> Placement:
    """Plan at which moments of a step each unit is gathered on the device, within a budget. Pure arithmetic.

    Args:
        trace: Trace of the step: the units that each moment needs.
        sizes: Bytes of each gathered unit, by name.
        budget: Bytes of the device, as a number or a text such as "80GB"; or bytes by tier, such as {"device": "80GB",
            "host": "100GB", "disk": "1TB"}. If it has only the device, the host is unlimited.
        policy: Name of a policy. "behind" drops a unit as soon as the next unit begins. "static" keeps the first
            units that fit for the whole step. "next_use" keeps the units that are needed soonest. `register_policy`
            adds other policies.

    Raises:
        TypeError: The budget has another type.
        ValueError: The budget is too small or has an unknown tier, a unit has no size, the policy is not registered, or
            its placement lacks a unit that a moment needs or exceeds the budget.
    """
    tiers = bytes_by_tier(budget)
    if "device" not in tiers:
        raise ValueError(f"budget is {budget!r}, without the device; give its bytes, such as {{'device': '80GB'}}")
    for moment in trace.moments:
        for unit in moment.needs:
            if unit not in sizes:
                raise ValueError(f"sizes have no {unit!r}, which the trace needs; give the bytes of every unit")
    for unit, size in sizes.items():
        if size < 0:
            raise ValueError(f"sizes[{unit!r}] is {size} bytes; give 0 or more")
    check_least(trace, sizes, tiers["device"])
    placement = POLICIES[policy](trace, sizes, tiers)
    # A policy may be another package's function, so the result of every policy is checked.
    ledger = simulate(trace, sizes, placement)
    if ledger.missing:
        moment = trace.moments[ledger.missing[0]]
        raise ValueError(
            f"the policy {policy!r} lacks a unit at moment {ledger.missing[0]}, {moment.kind} of {moment.unit!r}; have "
            "it fetch what a moment needs, at the latest when that begins"
        )
    for tier, bytes_ in tiers.items():
        if ledger.peak.get(tier, 0) > bytes_:
            raise ValueError(
                f"the policy {policy!r} takes {format_bytes(ledger.peak[tier])} of the {tier}, whose budget is "
                f"{format_bytes(bytes_)}; have it keep less"
            )
    return placement


def check_least(trace: Trace, sizes: Sizes, device: int, resident: int = 0) -> None:
    """Check that each single moment fits into the budget of the device, which every placement needs.

    Args:
        trace: Trace of the step.
        sizes: Bytes of each unit, by name.
        device: Bytes of the device.
        resident: Bytes that stay on the device throughout: shards of parameters, gradients and state. Default: 0.

    Raises:
        ValueError: A moment does not fit.
    """
    needs = [resident + moment.other + sum(sizes[unit] for unit in moment.needs) for moment in trace.moments]
    least = max(needs, default=0)
    if least > device:
        number = needs.index(least)
        moment = trace.moments[number]
        shares = f"shares, gradients and state {format_bytes(resident)}, " if resident else ""
        needed = least - moment.other - resident
        units = f"{_count(len(moment.needs))} {format_bytes(needed)}, " if moment.needs else ""
        where = f"moment {number}, {moment.kind}" + (f" of {moment.unit!r}" if moment.unit else "")
        raise ValueError(
            f"the budget of the device is {format_bytes(device)}, and {format_bytes(least)} are the least: "
            f"{shares}{units}other {format_bytes(moment.other)} ({where}); give more, or make units smaller"
        )


def _count(units: int) -> str:
    return "one unit" if units == 1 else f"{units} units"
