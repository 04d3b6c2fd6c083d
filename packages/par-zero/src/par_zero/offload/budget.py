"""Budgets of tiers: what is "auto" becomes parts of tiers, as little elsewhere as the device's budget asks for.

device     all of it, less what is missing: first the optimizer's state leaves, then gradients, then parameters
host       takes what is missing, as far as it has room
disk       takes the rest

Bytes are counted by the same cuts by which things are then brought away, so what is chosen fits, and what is refused
would not have fitted: for all ranks alike, of which the last may have less, in padding, and of experts some may have
more.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist

from par_groups import agree

from .._param_groups import ParamGroup
from .._policies import ShardOptions
from .._stage import ZeroStage
from .._tiers import TIERS, Offload, least_in_words
from ..layout.buffers import buffer_elements
from ..layout.build import ChunkPlan
from ..layout.packing import ALIGNMENT, ChunkLayout
from ..layout.sharers import DataParallelGroup
from ..optimizer.probe import state_counter_bytes
from ..placement.room import units_at_once
from .away import Held, TierLayout, held_of, lay_out, resident_bytes, slots_by_group, whole_bytes
from .pieces import PAGE, pages

Counted = Mapping[str, Mapping[str, int]]
"""Bytes by tier and kind."""

_NAMED = {"optimizer": "the optimizer's state", "gradients": "gradients", "parameters": "parameters"}
"""How errors call what may be "auto"."""


class Tally:
    """Counts what a rank will have in each tier, at the fullest moment of a step but for activations.

    Args:
        plans: The chunks, which have no memory yet, the last that runs first.
        groups: The param groups of all optimizers.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        options: The dtypes, and how many chunks are reduced at a time.
        receives: For each of those who share, whether a reduction receives into memory of its own.
        beside: Bytes of parameters and buffers of the module that no chunk has.
    """

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        groups: Sequence[ParamGroup],
        stage: ZeroStage,
        options: ShardOptions,
        *,
        receives: Sequence[bool],
        beside: int,
    ) -> None:
        self._plans, self._stage, self._options, self._beside = plans, stage, options, beside
        self._slots = slots_by_group(plans, groups, options)
        self._counts = {
            key: state_counter_bytes(groups[key[0]].optimizer, groups[key[0]].settings, key[1]) for key in self._slots
        }
        self._receives = tuple(receives)
        self.units = units_at_once(whole_bytes(plans, options)) if stage.shards_parameters else {}

    def count(self, held: Held, offload: Offload) -> Counted:
        """Return the bytes of this rank at the peak of a step, by tier and kind.

        Args:
            held: Slices of the chunks that this rank's optimizers update.
            offload: Tier of each kind of state.
        """
        laid = lay_out(self._plans, held, self._slots, offload, self._options)
        found = {tier: dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0) for tier in TIERS}
        found["device"] = {"parameters": 0} | self.units | found["device"] | {"parameters": self._beside}
        for plan in self._plans:
            home, used = laid.homes[plan], plan.dtype_in_use(self._options)
            own = _count_of(plan, is_share=self._stage.shards_parameters) * used.itemsize
            found[home.parameters]["parameters"] += pages(own) if home.parameters == "disk" else own
            if plan not in laid.pieces:
                continue
            stepped = sum(part.stop - part.start for part in laid.pieces[plan])
            if home.gradients != "disk":
                found[home.gradients]["gradients"] += self._sum_of(plan)
                if self._reduced(plan) != plan.dtype:  # and what the optimizer gets
                    found[home.gradients]["gradients"] += stepped * plan.dtype.itemsize
            for part in laid.pieces[plan]:
                slots = self._slots[part.group, plan.dtype]
                if part.tier != "disk":
                    size = sum(dtype.itemsize for dtype in slots.values())
                    found[part.tier]["optimizer"] += (part.stop - part.start) * size
                found["device"]["optimizer"] += self._counts[part.group, plan.dtype]
            if used != plan.dtype:  # copies have the padding too
                padding = _count_of(plan, is_share=self._stage.shards_state) - stepped
                found["device"]["optimizer"] += padding * plan.dtype.itemsize
            found["disk"]["optimizer"] += sum(block.size for block in laid.blocks[plan])
            found["disk"]["gradients"] += sum(block.gradient_size for block in laid.blocks[plan])
        found["device"]["buffers"] = self._reductions(laid)
        found["host"]["buffers"] = self._ring(laid, offload.ahead)
        return found

    def _reduced(self, plan: ChunkPlan) -> torch.dtype:
        used = plan.dtype_in_use(self._options)
        return self._options.precision.reduce_dtype or used if plan.dtype.is_floating_point else used

    def _sum_of(self, plan: ChunkPlan) -> int:
        """Bytes of what a rank keeps of a chunk's reduced gradients."""
        return _count_of(plan, is_share=self._stage.shards_gradients) * self._reduced(plan).itemsize

    def _reductions(self, laid: TierLayout) -> int:
        """Bytes in which gradients are reduced, of as many chunks as are under way; and one chunk's that arrive."""
        inflight, stepped = self._options.overlap.inflight or 2, [plan for plan in self._plans if plan in laid.pieces]
        whole = [plan.layout.size * self._reduced(plan).itemsize for plan in stepped]
        received = [size for plan, size in zip(stepped, whole, strict=True) if self._receives[plan.share]]
        arriving = [plan.layout.size * plan.dtype_in_use(self._options).itemsize for plan in stepped]
        passing = [self._sum_of(plan) for plan in stepped if laid.homes[plan].gradients == "disk"]
        lent = buffer_elements(received, inflight)
        if self._stage.shards_gradients:  # those of a unit come in an order of their own
            kept = inflight if len(self._receives) > 1 else None
            lent += buffer_elements(whole, inflight + self._waiting(stepped), kept=kept)
        return lent + _largest(passing, inflight) + max(arriving, default=0)

    def _waiting(self, stepped: Sequence[ChunkPlan]) -> int:
        """How many chunks more than are reduced at a time may have gradients that wait for their turn.

        Where not all ranks share all chunks, those of a unit wait until backward has left it, and those of the root
        until it ends. At stage 2 any may wait, until ranks have learned in which order they come.
        """
        if len(self._receives) == 1:
            return 0
        if not self._stage.shards_parameters:
            return len(stepped) if self._options.overlap.inflight else 0
        chunks = Counter(plan.place.unit for plan in stepped)
        of_root = chunks.pop(0, 0)
        return of_root + max(chunks.values(), default=1) - 1

    def _ring(self, laid: TierLayout, ahead: int) -> int:
        """Bytes of the buffers through which passes what lies on a disk."""
        pieces, sums, shares = [], [], dict[int, int]()
        for plan, home in laid.homes.items():
            is_away = home.parameters == "disk"
            itemsize = plan.dtype_in_use(self._options).itemsize
            if is_away:
                unit = plan.place.unit
                shares[unit] = shares.get(unit, 0) + pages(plan.layout.shard * itemsize)
            sums.append(sum(block.gradient_size for block in laid.blocks[plan]))
            parts = [part for part in laid.pieces.get(plan, ()) if part.in_pieces]
            for part, block in zip(parts, laid.blocks[plan], strict=True):
                own = pages(PAGE + (part.stop - part.start) * itemsize) if is_away else 0
                pieces.append(block.stop - block.start + own)
        ring = max(pieces, default=0) * min(ahead, len(pieces))
        return ring + _largest(sums, 2) + _largest(list(shares.values()), 2)  # of which one may be read in vain


def _count_of(plan: ChunkPlan, *, is_share: bool) -> int:
    """Number of elements that a rank has of a chunk."""
    return plan.layout.shard if is_share else plan.layout.size


def _largest(sizes: Sequence[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Data of one kind whose option of `Offload` is "auto": optimizer state, gradients or parameters.

    The data can be split between tiers at numbered positions, from 0 (its beginning) to `cuts` (its end).

    Args:
        cuts: Number of the last position.
        place: Function from the number of a position to the fraction of the data before it, 0 to 1.
    """

    cuts: int
    place: Callable[[int], float]

    def parts(self, near: int, far: int) -> dict[str, float]:
        """Fractions on host and disk: data before `near` is on the device, data from `near` to `far` on the host."""
        return {"host": self.place(far) - self.place(near), "disk": 1 - self.place(far)}


Places = Mapping[str, tuple[int, int]]
"""Of each source, by name, where the part on the device ends, and where that on the host does."""


def within_budgets(
    offload: Offload,
    plans: Sequence[ChunkPlan],
    groups: Sequence[ParamGroup],
    stage: ZeroStage,
    options: ShardOptions,
    *,
    shares: Sequence[DataParallelGroup],
    beside: int,
    is_on_cpu: bool,
) -> Offload:
    """The same with parts of tiers in place of "auto", and the budget that whole units have. An all-gather.

    Args:
        offload: What may lie where.
        plans: The chunks, which have no memory yet, the last that runs first.
        groups: The param groups of all optimizers.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        options: The options of `shard`.
        shares: Who shares what.
        beside: Bytes of parameters and buffers of the module that no chunk has.
        is_on_cpu: Whether the device is a CPU, where nobody else tells how many bytes there are of other things.

    Raises:
        ValueError: A tier has too little room, on any rank.
    """
    ranks = [dist.get_rank(share.group) for share in shares]
    receives = [_receives(share, stage) for share in shares]
    held = _from_the_first(held_of(plans, stage, ranks))
    sharers = [group for share in shares for group in share.groups]
    layouts = tuple(plan.layout for plan in plans) if len(shares) > 1 else ()  # with one share they are alike
    of_all = dict.fromkeys(agree(None, (held, layouts), *sharers).values())
    tallies = {
        theirs: Tally(_laid_as(plans, theirs), groups, stage, options, receives=receives, beside=beside)
        for _, theirs in of_all
    }
    sources = _sources(offload, plans, options, [each for each, _ in of_all])

    def counted(found: Offload) -> list[Counted]:
        return [tallies[theirs].count(each, found) for each, theirs in of_all]

    def with_parts(places: Places) -> Offload:
        parts = {name: sources[name].parts(*ends) for name, ends in places.items()}
        return replace(offload.with_parts(parts), budget=None)

    def fits(tier: str, places: Places) -> bool:
        found, budget = with_parts(places), offload.budgets[tier]
        return all(sum(each[tier].values()) <= budget for each in counted(found))

    found = with_parts(_places(offload, sources, fits))
    _check(offload, counted(found))
    if not stage.shards_parameters or "device" not in offload.budgets:
        return found
    found = replace(found, budget={"device": offload.budgets["device"]})
    if offload.auto and offload.other is None and is_on_cpu:
        tally = tallies[layouts]
        there = sum(tally.count(held, found)["device"].values()) - sum(tally.units.values())
        resident = resident_bytes(plans, groups, ranks, options, found)
        other = max(0, there - sum(resident.values()))  # so that units leave room for buffers
        found = replace(found, other=lambda: other)
    return found


def _receives(share: DataParallelGroup, stage: ZeroStage) -> bool:
    """Whether a reduction over those who share receives into memory of its own."""
    ranks = dist.get_world_size(share.group)
    return ranks > 1 and (stage.shards_state or ranks > 2 or share.replicas is not None)


def _laid_as(plans: Sequence[ChunkPlan], layouts: Sequence[ChunkLayout]) -> list[ChunkPlan]:
    """The chunks as another rank has them, which may have other experts than this one; no layouts: as they are."""
    if not layouts:
        return list(plans)
    return [replace(plan, layout=layout) for plan, layout in zip(plans, layouts, strict=True)]


def _from_the_first(held: Held) -> Held:
    """The same, wherever in a chunk a rank's share begins, so that those of most ranks are equal."""
    return tuple(tuple(replace(part, start=0, stop=part.stop - part.start) for part in ranges) for ranges in held)


def _sources(
    offload: Offload, plans: Sequence[ChunkPlan], options: ShardOptions, of_all: Sequence[Held]
) -> dict[str, _Source]:
    """What is "auto", by name: state may be cut at multiples of some elements, all else between chunks."""
    total = max(sum(part.stop - part.start for ranges in held for part in ranges) for held in of_all)
    sizes = (plan.most_kept * plan.dtype_in_use(options).itemsize for plan in reversed(plans))
    ends = list(accumulate(sizes, initial=0))

    def part_of_state(number: int) -> float:
        return number * ALIGNMENT / total if total else 1.0

    def part_of_units(number: int) -> float:
        return ends[number] / ends[-1]

    of_state = _Source(cuts=total // ALIGNMENT, place=part_of_state)
    of_units = _Source(cuts=len(ends) - 1, place=part_of_units)
    return {name: of_state if name == "optimizer" else of_units for name in offload.auto}


def _places(offload: Offload, sources: Mapping[str, _Source], fits: Callable[[str, Places], bool]) -> Places:
    """Where sources are cut: the first leaves the device first, and goes to the host first.

    Args:
        offload: The budgets.
        sources: What is "auto", by name, in the order in which it leaves the device.
        fits: Whether what a tier would have of that is within its budget.
    """
    has_host, has_disk = (bool(offload.budgets.get(tier)) for tier in ("host", "disk"))
    places = {name: (source.cuts, source.cuts) for name, source in sources.items()}

    def cut_on_device(name: str, near: int) -> tuple[int, int]:
        return near, near if has_disk else sources[name].cuts

    def fits_device(name: str, near: int) -> bool:
        return fits("device", {**places, name: cut_on_device(name, near)})

    def fits_host(name: str, far: int) -> bool:
        return fits("host", {**places, name: (places[name][0], far)})

    for name, source in sources.items():
        if not (has_host or has_disk) or fits("device", places):
            break
        places[name] = cut_on_device(name, _last(range(source.cuts + 1), partial(fits_device, name)))
    if not (has_host and has_disk):
        return places
    on_host = {name: (near, sources[name].cuts) for name, (near, _) in places.items()}
    if fits("host", on_host):  # without the buffers that a disk needs
        return on_host
    for name, (near, _) in places.items():
        places[name] = near, _last(range(near, sources[name].cuts + 1), partial(fits_host, name))
    return places


def _last(numbers: range, fits: Callable[[int], bool]) -> int:
    """The last of some numbers that fits; the first if none does. Those before one that fits do too."""
    if fits(numbers[-1]):
        return numbers[-1]
    low, high = numbers[0], numbers[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(offload: Offload, of_all: Sequence[Counted]) -> None:
    """Checks that what lies in each tier is within its budget. That of the device alone is checked by its `Room`.

    Args:
        offload: The budgets, and what was "auto".
        of_all: Bytes of ranks.

    Raises:
        ValueError: The budget of a tier is too small.
    """
    for tier in TIERS:
        if tier not in offload.budgets or (tier == "device" and not offload.auto):
            continue
        parts = max((counted[tier] for counted in of_all), key=lambda sizes: sum(sizes.values()))
        if sum(parts.values()) <= offload.budgets[tier]:
            continue
        words = least_in_words(tier, offload.budgets[tier], parts)
        if not offload.auto:
            raise ValueError(f"{words}; raise it, or let less lie there")
        if tier != "device":
            raise ValueError(f"{words}, for which the device has no room; raise it, or that of the device")
        names = " and ".join(_NAMED[name] for name in offload.auto)
        if not any(offload.budgets.get(far) for far in ("host", "disk")):
            raise ValueError(f"{words}; raise it, or give bytes of a host or a disk, where {names} may lie")
        raise ValueError(f"{words}, with all that is 'auto' elsewhere; raise it")
