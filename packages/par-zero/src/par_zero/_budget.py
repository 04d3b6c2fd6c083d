"""Byte budgets of tiers: how much of the data whose option is "auto" is offloaded, and to which tier.

The device keeps as much as its budget allows: optimizer state is offloaded first, then gradients, then parameters. The
host takes what its budget allows, and the disk the rest. Bytes are counted by the arithmetic that later splits the
data, so a choice fits exactly, and data that `shard` rejects would not have fitted.
"""

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, state_counter_bytes, together

from ._policies import ShardOptions
from ._tiers import TIERS, Offload, least_in_words
from .layout.meter import BUFFERS, GRADIENTS
from .layout.packing import ALIGNMENT, ChunkLayout
from .layout.plan import ChunkPlan, ModelPlan
from .layout.sizes import plan_module
from .offload.link import pinned_size
from .offload.pieces import PAGE, pages
from .offload.plan import ChunkTiers, UpdatedSlices, assign_tiers, slots_by_group, unit_bytes, updated_slices
from .placement.room import Room
from .programs.ledger import ZeroProgram
from .programs.planned import register_model
from .programs.predict import RegisteredModel, predict_steps

TierBytes = Mapping[str, Mapping[str, int]]
"""Bytes by tier and kind."""

_KINDS = {"optimizer": "the optimizer's state", "gradients": "gradients", "parameters": "parameters"}
"""Names of the options that may be "auto", for errors."""


class PeakMemory:
    """Bytes of a rank in each tier at the peak of a step, without activations.

    The ledger counts the units, gradients and buffers of the step that is predicted, in which two reductions are in
    flight if the options set no bound.

    Args:
        model: Plan of the module.
    """

    def __init__(self, model: ModelPlan) -> None:
        self._model = model
        self._slots = slots_by_group(model)
        self._counter_bytes = {
            key: state_counter_bytes(model.groups[key[0]].optimizer, model.groups[key[0]].settings, key[1])
            for key in self._slots
        }
        self._steps: dict[object, tuple[Mapping[str, int], int]] = {}  # by the tiers of gradients

    def count(self, updated: UpdatedSlices, offload: Offload) -> TierBytes:
        """Return the bytes of a rank, by tier and kind.

        Args:
            updated: Slices that the rank's optimizers update.
            offload: Tier of each kind of data.
        """
        chunks = self.assign(updated, offload)
        found = self._resident(chunks)
        found["device"]["parameters"] += self._model.unpacked
        peak, _ = self._step(chunks)
        found["device"] |= peak
        found["host"][BUFFERS] = self._staging_buffers(chunks, offload.ahead)
        return found

    def resident(self, updated: UpdatedSlices, offload: Offload) -> dict[str, int]:
        """Return the bytes that the device holds throughout a step, by kind."""
        return self._resident(self.assign(updated, offload))["device"]

    def passing(self, updated: UpdatedSlices, offload: Offload) -> int:
        """Return the largest number of bytes that the device holds in addition to units and resident bytes."""
        chunks = self.assign(updated, offload)
        _, beside_units = self._step(chunks)
        return beside_units - self._resident(chunks)["device"][GRADIENTS]

    def register(self, chunks: Sequence[tuple[ChunkPlan, ChunkTiers]], *, is_late: bool = False) -> RegisteredModel:
        """Return the module as its program will see it, with two reductions in flight if the options set no bound.

        Args:
            chunks: Chunks and their tiers, as `assign` returns them.
            is_late: Whether a thread may step pieces while the next step begins. Default: False.
        """
        model = register_model(self._model, tiers=[each for _, each in chunks], is_late=is_late)
        # With several groups any chunk may wait for another one, until the ranks have learned an order. Without a
        # bound, chunks are reduced section by section.
        waits = len(self._model.ranks) > 1 and model.inflight is not None
        return replace(model, inflight=model.inflight or 2, waits=waits)

    def assign(self, updated: UpdatedSlices, offload: Offload) -> list[tuple[ChunkPlan, ChunkTiers]]:
        """Return each chunk with its tiers."""
        return list(zip(self._model.chunks, assign_tiers(self._model, updated, self._slots, offload), strict=True))

    def _resident(self, chunks: Sequence[tuple[ChunkPlan, ChunkTiers]]) -> dict[str, dict[str, int]]:
        found = {tier: dict.fromkeys(("parameters", GRADIENTS, "optimizer"), 0) for tier in TIERS}
        stage, on_cpu = self._model.stage, self._model.is_on_cpu
        for plan, tiers in chunks:
            home, in_use = tiers.home, plan.dtype_in_use
            own = _elements(plan, sharded=stage.shards_parameters) * in_use.itemsize
            size_in = {"device": int, "host": int if on_cpu else pinned_size, "disk": pages}
            found[home.parameters]["parameters"] += size_in[home.parameters](own)
            if tiers.pieces is None:
                continue
            stepped = self._model.stepped_elements(plan, tiers.pieces)
            # The host of an accelerator steps copies of what the device keeps, by gradients that follow there.
            away = 0 if on_cpu else sum(part.stop - part.start for part in tiers.pieces if part.in_pieces)
            if home.gradients != "disk":
                # The optimizer gets a cast copy of gradients in another dtype, and assembled tensors in any dtype. The
                # thread of a step on the host casts one piece after the other, but clipping and norms read all
                # gradients before.
                reduced = plan.reduce_dtype
                cast = plan.dtype.itemsize * (plan.reduce_dtype != plan.dtype or plan.assembled)
                sums = _elements(plan, sharded=stage.shards_gradients) * reduced.itemsize
                stays = away < tiers.elements or not stage.shards_gradients
                found[home.gradients][GRADIENTS] += sums * stays + (stepped - away) * cast
                found["host"][GRADIENTS] += away * cast + sum(
                    pinned_size((part.stop - part.start) * reduced.itemsize)
                    for part in tiers.pieces
                    if part.in_pieces and not on_cpu
                )
            for part in tiers.pieces:
                if part.tier != "disk":
                    count, slots = part.stop - part.start, self._slots[part.group, plan.dtype, plan.kept]
                    found[part.tier]["optimizer"] += count * sum(dtype.itemsize for dtype in slots.values())
                    if part.tier == "host" and not on_cpu:
                        # The copy that the host steps is pinned. In another dtype it is one of the slots.
                        copy = count * plan.dtype.itemsize
                        is_slot = in_use != plan.dtype
                        pinned = pinned_size(copy) if is_slot or home.parameters == "device" else 0
                        found["host"]["optimizer"] += pinned - copy * is_slot
                found["device"]["optimizer"] += self._counter_bytes[part.group, plan.dtype, plan.kept]
            if plan.assembled and in_use == plan.dtype:  # in another dtype the assembled tensor is one of the slots
                found["device"]["optimizer"] += stepped * plan.dtype.itemsize
            elif in_use != plan.dtype and not away and not plan.assembled:  # master copies include the chunk's padding
                padding = _elements(plan, sharded=stage.shards_state) - stepped
                found["device"]["optimizer"] += padding * plan.dtype.itemsize
            found["disk"]["optimizer"] += sum(block.size for block in tiers.blocks)
            found["disk"][GRADIENTS] += sum(block.gradient_size for block in tiers.blocks)
        return found

    def _step(self, chunks: Sequence[tuple[ChunkPlan, ChunkTiers]]) -> tuple[Mapping[str, int], int]:
        """Return the bytes by kind at the peak of a step, and the largest number of bytes that are no units."""
        # The tiers of the optimizer's state change them only on an accelerator, from where gradients follow the state.
        # On a CPU the number of stepped elements decides, which differs between ranks.
        key = tuple(
            (tiers.home.gradients, tiers.elements if self._model.is_on_cpu else tuple(tiers.pieces or ()))
            for _, tiers in chunks
        )
        if key not in self._steps:
            program = predict_steps(self.register(chunks), accumulates=True)[-1]
            without_units = replace(program, units=dict.fromkeys(program.units, 0))
            self._steps[key] = program.peak(), sum(without_units.peak().values())
        return self._steps[key]

    def _staging_buffers(self, chunks: Sequence[tuple[ChunkPlan, ChunkTiers]], ahead: int) -> int:
        """Return the bytes of staging buffers in host memory."""
        pieces, gradients, shards, rounded = [], [], dict[int, int](), []
        for plan, tiers in chunks:
            on_disk = tiers.home.parameters == "disk"
            itemsize = plan.dtype_in_use.itemsize
            if on_disk:
                unit = plan.place.unit
                shards[unit] = shards.get(unit, 0) + pages(plan.layout.shard * itemsize)
            gradients.append(sum(block.gradient_size for block in tiers.blocks))
            parts = [part for part in tiers.pieces or () if part.in_pieces]
            for part, block in zip(parts, tiers.blocks, strict=True):
                own = pages(PAGE + (part.stop - part.start) * itemsize) if on_disk else 0
                pieces.append(block.stop - block.start + own)
                # A link copies to the device from pinned memory in the dtype in use. Other values pass a buffer there.
                is_pinned = part.tier == "host" and plan.dtype_in_use == plan.dtype
                if not self._model.is_on_cpu and tiers.home.parameters == "device" and not is_pinned:
                    rounded.append((part.stop - part.start) * itemsize)
        ring = max(pieces, default=0) * min(ahead, len(pieces)) + max(rounded, default=0) * min(ahead, len(rounded))
        # Two units: a wrong prefetch may be in a buffer while the right shard is read into another.
        return ring + _largest(gradients, 2) + _largest(list(shards.values()), 2)


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step of a module that is not sharded yet, and the bytes of one rank.

    Args:
        first: Programs of the first steps; the last one is the program of all later steps.
        tiers: Bytes by tier and kind, with two reductions in flight in one pass whose gradients are still there in the
            next one. The kind "optimizer" has the optimizer's state and its copies of parameters.
        movable: Bytes of the optimizer that `Offload(optimizer="host")` moves on a CPU.
    """

    first: tuple[ZeroProgram, ...]
    tiers: TierBytes
    movable: int

    @property
    def parameters(self) -> int:
        """Bytes on the device of the parameters that the rank keeps between passes, and of the module's buffers."""
        return self.tiers["device"]["parameters"]

    @property
    def optimizer(self) -> int:
        """Bytes on the device of the optimizer's state and of its master weights."""
        return self.tiers["device"]["optimizer"]

    @property
    def program(self) -> ZeroProgram:
        """Program of a step, whose `peak` has the bytes of units, gradients and buffers."""
        return self.first[-1]


def predict_step(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int,
    ranks: int,
    options: ShardOptions | None = None,
    expert_groups: Sequence[tuple[Sequence[nn.Parameter], int]] = (),
    gloo: bool = False,
    microbatches: int = 1,
    no_sync: bool = False,
    accumulates: bool = False,
    offload: Offload | None = None,
    accelerator: bool = False,
) -> PredictedStep:
    """Return the step of a module that is not sharded yet, without changing it or communicating.

    For a sharded module that has not run yet, `program` returns the program of a step of one forward and one backward.

    Args:
        module: Module, which may be on the meta device.
        optimizer: Optimizers, as for `shard`.
        stage: Stage of `shard`, 0 to 3.
        ranks: Number of ranks that shard the parameters.
        options: Options of `shard`; None: the defaults. Without `Overlap(inflight=...)` two reductions are in flight,
            with `expert_groups` any number.
        expert_groups: Parameters and number of ranks of each of the `expert_groups` of `shard`.
        gloo: Whether ranks reduce over gloo, which receives into a buffer as large as the gradients of a chunk.
            Default: False.
        microbatches: Number of forward and backward passes in a step. Default: 1.
        no_sync: Whether all passes but the last are under `no_sync`, which then keeps units. Default: False.
        accumulates: Whether the gradients of a step are still there in the next one. Default: False.
        offload: Tiers of optimizer state, parameters and gradients, without budgets. None: all data is on the device.
        accelerator: Whether the module computes on an accelerator, whose host has other memory. Default: False.
    """
    options, tiers = options or ShardOptions(), offload or Offload()
    plan = plan_module(
        module, optimizer, stage=stage, ranks=ranks, options=options, expert_groups=expert_groups, gloo=gloo
    )
    updated, on_cpu = updated_slices(plan), PeakMemory(plan)
    memory = PeakMemory(replace(plan, is_on_cpu=False)) if accelerator else on_cpu
    model = memory.register(memory.assign(updated, tiers), is_late=tiers.is_late(is_on_cpu=not accelerator))
    if options.overlap.inflight is None and expert_groups:
        model = replace(model, inflight=None)
    passes = [*[not no_sync] * (microbatches - 1), True]
    return PredictedStep(
        first=tuple(predict_steps(model, passes=passes, accumulates=accumulates)),
        tiers=memory.count(updated, tiers),
        movable=on_cpu.count(updated, Offload(optimizer="host"))["host"]["optimizer"],
    )


def _elements(plan: ChunkPlan, *, sharded: bool) -> int:
    """Return the number of elements that a rank stores of a chunk."""
    return plan.layout.shard if sharded else plan.layout.size


def _largest(sizes: Sequence[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])


@dataclass(frozen=True, kw_only=True)
class AutoOption:
    """Data of one kind whose option of `Offload` is "auto": optimizer state, gradients or parameters.

    The data can be split between tiers at numbered positions, from 0 (its beginning) to `last` (its end).

    Args:
        last: Number of the last position.
        fraction_before: Function from the number of a position to the fraction of the data before it, 0 to 1.
    """

    last: int
    fraction_before: Callable[[int], float]

    def parts(self, near: int, far: int) -> dict[str, float]:
        """Return the fractions on host and disk if the device's part ends at `near` and the host's part at `far`."""
        return {"host": self.fraction_before(far) - self.fraction_before(near), "disk": 1 - self.fraction_before(far)}


TierEnds = Mapping[str, tuple[int, int]]
"""By option, positions at which the device's part and the host's part end."""


def fit_to_budgets(model: ModelPlan, offload: Offload, sharers: Sequence[dist.ProcessGroup]) -> Offload:
    """Return the same options with fractions of tiers in place of "auto". Collective: an all-gather.

    Args:
        model: Plan of the module.
        offload: Options and budgets.
        sharers: Process groups of all data-parallel groups.

    Raises:
        ValueError: A budget is too small, on any rank.
    """
    # A budget counts the receive buffers of gloo on every backend.
    model = replace(model, ranks=[replace(each, receives=True) for each in model.ranks])
    # Slices of the same sizes that begin at 0: most ranks then have equal ones, and are counted once.
    updated = tuple(
        tuple(replace(part, start=0, stop=part.stop - part.start) for part in slices)
        for slices in updated_slices(model)
    )
    # Ranks choose the same fractions, so each counts for all ranks: shards differ in padding, and experts in size.
    layouts = tuple(plan.layout for plan in model.chunks) if len(model.ranks) > 1 else ()  # of one group they are equal
    of_all = dict.fromkeys(agree(None, (updated, layouts), *sharers).values())
    memories = {theirs: PeakMemory(_with_layouts(model, theirs)) for _, theirs in of_all}
    autos = _auto_options(offload, model.chunks, [each for each, _ in of_all])

    def counted(found: Offload) -> list[TierBytes]:
        return [memories[theirs].count(each, found) for each, theirs in of_all]

    def with_ends(ends: TierEnds) -> Offload:
        parts: dict[str, Any] = {name: autos[name].parts(*each) for name, each in ends.items()}
        return replace(offload, **parts, budget=None)

    def fits(tier: str, ends: TierEnds) -> bool:
        found, budget = with_ends(ends), offload.budgets[tier]
        return all(sum(each[tier].values()) <= budget for each in counted(found))

    # An accelerator fetches parameters from its host only.
    host_only = () if model.is_on_cpu else ("parameters",)
    found = with_ends(_tier_ends(offload, autos, fits, host_only))
    _check(offload, counted(found))
    if not model.stage.shards_parameters or "device" not in offload.budgets:
        return found
    found = replace(found, budget={"device": offload.budgets["device"]})
    if offload.auto and offload.other is None:
        # Units may stay gathered in memory that is left, so they must leave memory for buffers as well. An allocator's
        # count would include activations, for which "auto" has left no memory.
        other = model.unpacked + memories[layouts].passing(updated, found)
        found = replace(found, other=lambda: other)
    return found


def plan_room(model: ModelPlan, offload: Offload, sharers: Sequence[dist.ProcessGroup]) -> Room | None:
    """Return the memory that the device's budget leaves for gathered units; None without a budget.

    Collective if there is a budget.

    Args:
        model: Plan of the module.
        offload: Budget and tiers.
        sharers: Process groups whose ranks raise together.

    Raises:
        ValueError: The budget is too small, on any rank.
    """
    if "device" not in offload.budgets or not model.stage.shards_parameters:
        return None
    resident = PeakMemory(model).resident(updated_slices(model), offload)
    with together("shard(offload=...)", *sharers):
        return Room(offload.budgets["device"], resident, unit_bytes(model.chunks), offload.policy, offload.other)


def _with_layouts(model: ModelPlan, layouts: Sequence[ChunkLayout]) -> ModelPlan:
    """Return the plan as a rank with other experts has it; without layouts, as it is."""
    if not layouts:
        return model
    chunks = [replace(plan, layout=layout) for plan, layout in zip(model.chunks, layouts, strict=True)]
    return replace(model, chunks=chunks)


def _auto_options(
    offload: Offload, plans: Sequence[ChunkPlan], of_all: Sequence[UpdatedSlices]
) -> dict[str, AutoOption]:
    """Return the "auto" options by name. State can be split at multiples of ALIGNMENT, other data between chunks."""
    total = max(sum(part.stop - part.start for slices in updated for part in slices) for updated in of_all)
    sizes = (plan.most_kept * plan.dtype_in_use.itemsize for plan in reversed(plans))
    ends = list(accumulate(sizes, initial=0))
    state = AutoOption(last=total // ALIGNMENT, fraction_before=lambda end: end * ALIGNMENT / total if total else 1.0)
    chunks = AutoOption(last=len(ends) - 1, fraction_before=lambda end: ends[end] / ends[-1])
    return {name: state if name == "optimizer" else chunks for name in offload.auto}


def _tier_ends(
    offload: Offload, autos: Mapping[str, AutoOption], fits: Callable[[str, TierEnds], bool], host_only: Container[str]
) -> dict[str, tuple[int, int]]:
    """Return where the parts of each option end, so that the nearest tiers get as much as fits.

    Args:
        offload: The budgets.
        autos: The "auto" options, in the order in which their data is offloaded.
        fits: Returns whether a tier's data is within its budget.
        host_only: Options whose data no disk can store.
    """
    has_host, has_disk = (bool(offload.budgets.get(tier)) for tier in ("host", "disk"))
    ends = {name: (auto.last, auto.last) for name, auto in autos.items()}

    def with_device_end(name: str, near: int) -> dict[str, tuple[int, int]]:
        return {**ends, name: (near, near if has_disk and name not in host_only else autos[name].last)}

    def fits_device(name: str, near: int) -> bool:
        return fits("device", with_device_end(name, near))

    def fits_host(name: str, far: int) -> bool:
        return fits("host", {**ends, name: (ends[name][0], far)})

    for name, auto in autos.items():
        if not (has_host or has_disk) or fits("device", ends):
            break
        ends = with_device_end(name, _last_that_fits(range(auto.last + 1), partial(fits_device, name)))
    if not (has_host and has_disk):
        return ends
    on_host = {name: (near, autos[name].last) for name, (near, _) in ends.items()}
    if fits("host", on_host):  # first, because without data on the disk the host needs no staging buffers
        return on_host
    for name, (near, _) in ends.items():
        if name in host_only:
            continue
        ends[name] = near, _last_that_fits(range(near, autos[name].last + 1), partial(fits_host, name))
    return ends


def _last_that_fits(numbers: range, fits: Callable[[int], bool]) -> int:
    """Return the last number that fits, or the first if none does. All numbers before one that fits do, too."""
    # Bisection, as each try lays out all chunks of all ranks.
    too_many = bisect_left(numbers, True, key=lambda number: not fits(number))
    return numbers[max(0, too_many - 1)]


def _check(offload: Offload, of_all: Sequence[TierBytes]) -> None:
    """Check that the data of each tier is within its budget. A `Room` checks the device's budget if nothing is "auto".

    Args:
        offload: Budgets, and the options that were "auto".
        of_all: Bytes of all ranks.

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
        names = " and ".join(_KINDS[name] for name in offload.auto)
        if not any(offload.budgets.get(far) for far in ("host", "disk")):
            raise ValueError(f"{words}; raise it, or give bytes of a host or a disk, where {names} may lie")
        raise ValueError(f"{words}, with all that is 'auto' elsewhere; raise it")
