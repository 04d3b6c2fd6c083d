"""The description of a module before it has run, from the plan of its chunks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from .._policies import ShardOptions
from .._stage import ZeroStage
from .._tiers import Home
from ..layout.plan import ChunkPlan
from ..layout.sharers import DataParallelGroup
from ..layout.units import outer_units, unit_names
from ..offload.plan import ChunkTiers
from .ledger import ChunkBytes, ZeroProgram
from .predict import RegisteredModel, RegisteredUnit


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """The ranks of a data-parallel group, as memory depends on them.

    Args:
        count: Number of ranks that shard the parameters.
        index: Index of this rank. Default: 0.
        receives: Whether a reduce-scatter receives into a buffer as large as its input, as over gloo.
        replicates: Whether other ranks hold the same shards. Default: False.
    """

    count: int
    index: int = 0
    receives: bool
    replicates: bool = False

    @classmethod
    def of(cls, share: DataParallelGroup, *, receives: bool) -> "PlannedRanks":
        """Return the ranks of an existing group."""
        return cls(
            count=dist.get_world_size(share.group),
            index=dist.get_rank(share.group),
            receives=receives,
            replicates=share.replicas is not None,
        )


def register_units(
    module: nn.Module, modules: Sequence[Sequence[nn.Module]], plans: Iterable[ChunkPlan]
) -> list[RegisteredUnit]:
    """Return the units of a module at stage 3.

    Args:
        module: Module that is sharded.
        modules: Modules of each unit, as `choose_units` returns them.
        plans: Chunks of the module.
    """
    used = {plan.place.unit for plan in plans}
    names, outer = unit_names(module, modules), outer_units(modules)
    return [
        RegisteredUnit(name=name.replace("'", ""), modules=len(own) if number in used else 0, outer=around)
        for number, (name, own, around) in enumerate(zip(names, modules, outer, strict=True))
    ]


def register_model(
    plans: Sequence[ChunkPlan],
    units: Sequence[RegisteredUnit],
    stage: ZeroStage,
    options: ShardOptions,
    ranks: Sequence[PlannedRanks],
    *,
    tiers: Sequence[ChunkTiers] | None = None,
    is_late: bool = False,
    is_on_cpu: bool = True,
) -> RegisteredModel:
    """Return a module as its program will see it.

    Args:
        plans: Chunks of the module, in the order of their reductions.
        units: Units at stage 3; empty below stage 3.
        stage: ZeRO stage.
        options: Options of `shard`.
        ranks: Ranks of each data-parallel group.
        tiers: Tiers of each chunk's data. None: all data is on the device.
        is_late: Whether a thread may step pieces while the next step begins. Default: False.
        is_on_cpu: Whether the module computes on a CPU, whose memory is the host's. Default: True.
    """
    tiers = tiers or [ChunkTiers(home=Home(), pieces=None, blocks=())] * len(plans)
    chunks = dict[str, ChunkBytes]()
    optimizers: list[dict[str, list[str]]] = [{} for _ in range(max((plan.owner for plan in plans), default=-1) + 1)]
    for plan, each in zip(plans, tiers, strict=True):
        pieces = each.pieces or ()
        if plan.owner >= 0:
            names = [f"{plan.name}+{part.start}" for part in pieces if part.in_pieces]
            optimizers[plan.owner][plan.name] = names
        unit = units[plan.place.unit].name if units else None
        found = _chunk_bytes(plan, unit, stage, ranks[plan.share], each.home)
        # Gradients of pieces continue on the host of an accelerator, and are cast there.
        if not is_on_cpu and any(part.in_pieces for part in pieces):
            here = sum(part.stop - part.start for part in pieces if not part.in_pieces) * plan.dtype.itemsize
            found = replace(found, cast=here if found.cast else 0, is_written=found.is_written or not here)
        chunks[plan.name] = found
    return RegisteredModel(
        sizes=ZeroProgram(
            entries=(),
            units={
                unit.name: sum(chunk.full for chunk in chunks.values() if chunk.unit == unit.name)
                for unit in units
                if unit.modules
            },
            chunks=chunks,
            shards_gradients=stage.shards_gradients,
            kept_buffers=options.overlap.inflight or 2,
            is_late=is_late,
        ),
        units=units,
        optimizers=optimizers,
        inflight=options.overlap.inflight,
        gathers_after_step=stage.shards_state and not stage.shards_parameters,
    )


def _chunk_bytes(plan: ChunkPlan, unit: str | None, stage: ZeroStage, own: PlannedRanks, home: Home) -> ChunkBytes:
    layout, reduced = plan.layout, plan.reduce_dtype
    gradient = layout.size * reduced.itemsize if plan.trained else 0
    low, high = plan.updated(own.index, stage)
    # Full tensors for an optimizer are assembled from the sum, and cast by the assembly.
    is_cast = reduced != plan.dtype and plan.owner >= 0 and not plan.assembled
    slices = layout.slots if layout.atomic else [(part.start, part.stop) for part in layout.slices(low, high)]
    cast = sum(max(0, min(stop, high) - max(start, low)) for start, stop in slices) * plan.dtype.itemsize
    return ChunkBytes(
        unit=unit,
        full=layout.size * plan.dtype_in_use.itemsize,
        share=plan.share,
        gradient=gradient,
        shard=layout.shard * reduced.itemsize if home.gradients != "host" else 0,
        arriving=plan.arriving,
        cast=cast if is_cast and home.gradients == "device" else 0,
        received=gradient if own.receives and own.count > 1 else 0,
        is_pair=not stage.shards_state and own.count == 2 and not own.replicates,
        is_written=home.gradients == "disk",
    )
