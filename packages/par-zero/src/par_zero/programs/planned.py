"""The description of a module before it has run, from the plan of its chunks."""

from collections.abc import Sequence
from dataclasses import replace

from .._tiers import Home
from ..layout.plan import ChunkPlan, ModelPlan
from ..offload.host_gradients import SUMS_IN_FLIGHT
from ..offload.plan import ChunkTiers
from .ledger import ChunkBytes, ZeroProgram
from .predict import RegisteredModel


def register_model(
    model: ModelPlan, *, tiers: Sequence[ChunkTiers] | None = None, is_late: bool = False
) -> RegisteredModel:
    """Return a module as its program will see it.

    Args:
        model: Plan of the module.
        tiers: Tiers of each chunk's data. None: all data is on the device.
        is_late: Whether a thread may step pieces while the next step begins. Default: False.
    """
    plans, units = model.chunks, model.units
    tiers = tiers or [ChunkTiers(home=Home(), pieces=None, blocks=())] * len(plans)
    chunks = dict[str, ChunkBytes]()
    optimizers: list[dict[str, list[str]]] = [{} for _ in range(max((plan.owner for plan in plans), default=-1) + 1)]
    for plan, each in zip(plans, tiers, strict=True):
        pieces = each.pieces or ()
        if plan.owner >= 0:
            optimizers[plan.owner][plan.name] = [f"{plan.name}+{part.start}" for part in pieces if part.in_pieces]
        found = _chunk_bytes(model, plan, each)
        # Gradients of pieces continue on the host of an accelerator, and are cast there.
        if not model.is_on_cpu and any(part.in_pieces for part in pieces):
            here = sum(part.stop - part.start for part in pieces if not part.in_pieces) * plan.dtype.itemsize
            # Stages 0 and 1 keep the sum in the chunk's own buffer.
            leaves = model.stage.shards_gradients and not here
            found = replace(found, cast=here if found.cast else 0, is_written=found.is_written or leaves)
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
            shards_gradients=model.stage.shards_gradients,
            kept_buffers=model.options.overlap.inflight or 2,
            is_late=is_late,
            sending=0
            if model.is_on_cpu
            else SUMS_IN_FLIGHT * max((chunk.shard for chunk in chunks.values() if chunk.is_written), default=0),
        ),
        units=units,
        optimizers=optimizers,
        inflight=model.options.overlap.inflight,
        gathers_after_step=model.stage.shards_state and not model.stage.shards_parameters,
    )


def _chunk_bytes(model: ModelPlan, plan: ChunkPlan, tiers: ChunkTiers) -> ChunkBytes:
    layout, reduced, stage, own, home = plan.layout, plan.reduce_dtype, model.stage, model.ranks[plan.share], tiers.home
    gradient = layout.size * reduced.itemsize if plan.trained else 0
    # Full tensors for an optimizer are assembled from the sum, in any dtype.
    is_cast = plan.owner >= 0 and (reduced != plan.dtype or plan.assembled)
    slices = layout.slices(*plan.updated(own.index, stage)) if tiers.pieces is None else tiers.pieces
    cast = model.stepped_elements(plan, slices) * plan.dtype.itemsize
    # Other backends than gloo receive the sum alone, and at stages 2 and 3 where it stays.
    receives = gradient if own.receives else layout.shard * reduced.itemsize * (not stage.shards_gradients)
    return ChunkBytes(
        unit=model.units[plan.place.unit].name if model.units else None,
        full=layout.size * plan.dtype_in_use.itemsize,
        share=plan.share,
        gradient=gradient,
        shard=layout.shard * reduced.itemsize if home.gradients != "host" else 0,
        arriving=plan.arriving,
        cast=cast if is_cast and home.gradients == "device" else 0,
        received=receives if plan.trained and own.count > 1 else 0,
        is_pair=not stage.shards_state and own.count == 2 and not own.replicates,
        is_written=home.gradients == "disk" and bool(slices),  # padding alone stays in memory
        is_assembled=plan.assembled,
    )
