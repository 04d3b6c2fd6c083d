"""`shard` makes a module and its optimizer data parallel in one call."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import Sharding, backend_of, keep_packed_weights_, together

from ._budget import fit_to_budgets, plan_room
from ._collectives import abort, communicators, connect, is_in_use
from ._engine import Engine
from ._param_groups import ParamGroup, in_a_row, param_groups
from ._policies import MixedPrecision, OptimizerUpdate, Overlap, ParameterInit, ShardOptions, Units, policy_of
from ._stage import STAGES
from ._tiers import Offload
from ._torch_private import unsaved_buffers
from ._unit import make_units
from .checks.agreed import agreed, agreed_chunks, described
from .checks.module import (
    ENGINE,
    check_abstract,
    check_backends,
    check_expert_groups,
    check_groups,
    check_module,
    check_offload,
    check_optimizers,
)
from .layout.alike import broadcast_, make_rest_alike_
from .layout.build import members_of, pack_chunk_, plan_chunks
from .layout.chunk import Chunk
from .layout.fill import Filler, device_of, make_real_
from .layout.plan import ChunkPlan, ModelPlan, unpacked_bytes
from .layout.records import SameShare, record_, record_of
from .layout.sharers import DataParallelGroup, Groups, PlannedRanks, Sharers
from .layout.units import choose_units, register_units, tensors_of
from .layout.unwritten import Unwritten
from .offload.plan import OffloadPlan, offload_chunk_, plan_offload
from .optimizer.agreement import agreed_blocks
from .optimizer.assembly import assemble
from .optimizer.blocks import stepped_elements
from .programs.planned import register_model
from .watch.calls import ModuleCalls


def shard(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int,
    group: dist.ProcessGroup | DataParallelGroup,
    replicas: dist.ProcessGroup | None = None,
    expert_groups: Sequence[DataParallelGroup] = (),
    units: Units = "auto",
    precision: MixedPrecision | Mapping[str, Any] | None = None,
    overlap: Overlap | Mapping[str, Any] | None = None,
    offload: Offload | Mapping[str, Any] | None = None,
    update: OptimizerUpdate | Mapping[str, Any] | None = None,
    init: ParameterInit | Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Optimizer | Sequence[Optimizer] | None]:
    """Make a module and its optimizer data parallel over a group, in place. Collective.

    The training loop does not change: `loss.backward(); optimizer.step(); optimizer.zero_grad()`. All ranks
    receive the first rank's parameters and buffers, frozen parameters too. Later changes of buffers stay on their rank.

    The optimizer then holds flat shards. The dicts of its param groups stay the same objects, with other `params`.
    `shard` packs one chunk of parameters after the other and frees what it has packed, so it needs at most one more
    chunk of memory than the module.

    Args:
        module: Module on its device or on the meta device. For a ModuleList or ModuleDict you call the items instead,
            in any order, such as an actor and a critic that share an optimizer. `no_sync`, `summon` and `reset` of one
            item act on all items.
        optimizer: Optimizer that has every parameter of the module with `requires_grad`, and has not stepped. Or a list
            of optimizers, or a `par_groups.JointOptimizer`, that have each parameter once, such as Muon for matrices
            and AdamW for the rest. None: the module is only run.
        stage: ZeRO stage, which decides what is sharded. 0: nothing, as in DistributedDataParallel. 1: optimizer state.
            2: gradients too. 3: parameters too.
        group: Data-parallel ranks, which read different data. A `DataParallelGroup` also holds the index of each rank,
            for parameters that are replicated on ranks outside of the group.
        replicas: Ranks that hold the same shard as this rank, for hybrid sharding. None: each shard exists once.
        expert_groups: Data-parallel groups of parameters that only some of these ranks hold, such as experts:
            `[DataParallelGroup(groups["data", "expert_data"])]`. A parameter that no group names belongs to the first
            of `group` and `expert_groups` whose ranks all hold replicas by its sharding metadata
            (`par_groups.Sharding`). Without such a group, `shard` raises an error.
        units: Modules whose parameters stage 3 gathers together (FSDP units). "auto": the items of every ModuleList,
            ModuleDict and Sequential, with small neighbours joined. Or a function that returns whether a module is a
            unit, or a list of modules.
        precision: Dtypes of parameters and gradients, such as `MixedPrecision(param_dtype=torch.bfloat16)`.
        overlap: Sizes of buckets and how many of them are in flight, such as `Overlap(bucket="auto")`.
        offload: Tiers (device, host, disk) of the optimizer's state, and at stage 3 also of parameters and gradients,
            such as `Offload(optimizer="disk", path="/scratch")`. No result changes. On an accelerator, parameters can
            be offloaded only to the host, and gradients follow the optimizer.
        update: Update scope of the optimizer, such as `OptimizerUpdate(elementwise=True)` for a class of your own, and
            the tensor-parallel group on which full tensors are assembled.
        init: Initialization of parameters on the meta device, and the device of all parameters.

        Each of these policies may also be a mapping of its arguments. None: the defaults of the policy.

    Returns:
        The module and the optimizer that were passed.

    Raises:
        Exception: An exception of `init_fn` on this rank. The module is then sharded in part; create it and its
            optimizer again.
        ValueError, TypeError: The module or an option is not supported, or differs between ranks; on every rank.
        OSError: The file for a disk tier cannot be created.
    """
    # An error of this rank is kept until the ranks exchange it in `agreed`. A rank that raised it here would leave the
    # other ranks waiting in their first collective.
    problem: Exception | None = None
    members, options, modules, optimizers, parts = [], ShardOptions(), [[module]], list[Optimizer](), [0]
    abstract: dict[torch.Tensor, str] = {}  # tensors on the meta device
    filler: Filler | None = None
    tiers, stepped, start = Offload(), list[ParamGroup](), ParameterInit()
    first_group = group if isinstance(group, DataParallelGroup) else DataParallelGroup(group, replicas)
    known = expert_groups if isinstance(expert_groups, Sequence) else ()
    shares = [first_group, *(each for each in known if isinstance(each, DataParallelGroup))]  # the rest raises below
    sharers = [each for share in shares for each in share.groups]
    # Tensor-parallel ranks wait for each other below, so this rank needs their group even if a policy is wrong here.
    tensor = update.get("tensor_group") if isinstance(update, Mapping) else getattr(update, "tensor_group", None)
    try:
        options = ShardOptions.of(units=units, precision=precision, overlap=overlap, update=update)
        start, tiers = policy_of(ParameterInit, "init", init), policy_of(Offload, "offload", offload)
        optimizers = in_a_row(optimizer)
        stepped = param_groups(optimizers, options.update)
        check_module(module, stage)
        check_expert_groups(expert_groups, first_group, module, options)
        check_offload(tiers, module, stepped, stage, start.device)
        if replicas is not None and first_group.replicas is not replicas:
            raise ValueError(
                "replicas=...: group is a DataParallelGroup, which has its own replicas; pass "
                "group=DataParallelGroup(group, replicas) without replicas="
            )
        check_groups(first_group, options.overlap.gather_group, tensor)
        check_abstract(module, start, sharers)
        # Last, because trial steps may warn, and then no other check may raise.
        check_optimizers(module, stepped, stage, tensor, shares)
        unit_bytes = options.overlap.bucket_of(dist.get_world_size(first_group.group))
        if STAGES[stage].shards_parameters:
            modules = choose_units(module, units, unit_bytes)
        abstract = {each: name for name, each in tensors_of(module) if each.is_meta}
        if abstract and start.init_fn is not None:
            filler = Filler(module, choose_units(module, units, unit_bytes), start.init_fn)
        parts = [dist.get_rank()] if tensor is None else dist.get_process_group_ranks(tensor)
        members = members_of(
            module,
            stepped,
            STAGES[stage],
            modules,
            shares=shares,
            tensor=parts,
            param_dtype=options.precision.param_dtype,
        )
        if not members:
            raise ValueError(
                f"module={type(module).__name__}: it has no parameters to shard; pass a module with parameters, or do "
                "not shard this one"
            )
    except Exception as error:  # any error, also of the caller's function for units: the other ranks wait for this one
        problem = error
    gathers, device = options.overlap.gather_group, start.device
    # These options decide which collectives the ranks run and what they allocate, so they must be equal, too.
    given = (
        *(first_group.index_of is None, gathers is None, tensor is None, tiers.auto, tiers.furthest.fractions),
        *(tiers.piece_bytes, tiers.overlap),
        *(tiers.budgets, tiers.policy, list(abstract.values()), filler is None, getattr(device, "type", None)),
    )
    texts = [f"{described(members, stage, options, number)} {given}" for number in range(len(shares))]
    parameters = [member.parameter for member in members]
    ranks, used = tuple[int, ...](), tuple[bool, ...]()
    records, place = dict[nn.Parameter, Sharding](), torch.device("cpu")
    # Without chunks until the ranks have agreed.
    model = ModelPlan(chunks=(), units=(), groups=stepped, stage=STAGES[0], options=options, ranks=(), unpacked=0)
    offload_plan: OffloadPlan | None = None
    reach: tuple[bool, ...] = (True,)
    try:
        communicators_of = [[*share.groups, None if number else gathers] for number, share in enumerate(shares)]
        ranks, used = agreed(problem, texts, shares, list(map(is_in_use, communicators_of)))
        records = {parameter: record_of(parameter, ranks) for parameter in parameters}
        planned = plan_chunks(
            members,
            records,
            STAGES[stage],
            [dist.get_world_size(share.group) for share in shares],
            options,
            tensor=len(parts),
        )
        plans, reach = agreed_chunks(planned, shares)
        place = device_of(module, device)
        model = replace(
            model,
            chunks=plans,
            units=register_units(module, modules, {plan.place.unit for plan in plans})
            if STAGES[stage].shards_parameters
            else (),
            stage=STAGES[stage],
            ranks=[PlannedRanks.of(each, receives=backend_of(each.group, place.type) == "gloo") for each in shares],
            unpacked=unpacked_bytes(module, plans),
            is_on_cpu=place.type == "cpu",
        )
        tiers, offload_plan = _plan_offload(model, tiers, shares)
    except Exception as error:  # the ranks of the tensor group wait for this one
        if tensor is None:
            raise
        problem = error
    # The last point at which all errors so far are raised, on tensor-parallel ranks as well. The module is still
    # unchanged.
    blocks = agreed_blocks(problem, model.chunks, records, ranks, tensor, STAGES[stage])
    model = replace(model, assembled=stepped_elements(blocks, parts.index(dist.get_rank())))
    room = plan_room(model, tiers, sharers if tensor is None else [*sharers, tensor])
    computes_on = place if parameters[0].is_meta else torch.device(device or parameters[0].device)
    check_backends(sharers, computes_on, stage)
    # Packing changes the dtypes of parameters, so the module is described before.
    registered = register_model(
        model,
        tiers=None if offload_plan is None else offload_plan.chunks,
        is_late=offload_plan is not None and offload_plan.late,
    )
    each = _communicators(shares, used, stage, options, gathers)

    def pack_(plan: ChunkPlan) -> Chunk:
        where = place if plan.members[0].parameter.is_meta else device
        make_alike = partial(broadcast_, share=shares[plan.share])
        chunk = pack_chunk_(plan, each[plan.share], STAGES[stage], where, make_alike)
        offload_chunk_(offload_plan, model.chunks.index(plan), chunk)
        return chunk

    chunks = (
        [pack_(plan) for plan in model.chunks]
        if filler is None
        else _pack_filled_(model.chunks, filler, pack_, sharers)
    )
    _bring_rest_(module, () if filler is not None else abstract, place, device, packed=set(parameters), shares=shares)
    # The first collective on a communicator is a rendezvous. In a step, ranks could begin it in different orders.
    connect(_unconnected(each, [*sharers, gathers], tensor, computes_on), computes_on)
    copies = tuple(shares[0].replica_ranks) if STAGES[stage].shards_state else ranks
    engine = Engine(
        module,
        optimizers,
        chunks,
        STAGES[stage],
        Sharers(each=each, reach=reach),
        make_units(module, modules, chunks),
        assemblies=assemble(chunks, blocks, tensor, copies),
        model=registered,
        offload=offload_plan,
        room=room,
    )
    engine.watch(parameters)
    # The metadata describes the optimizer's slices, which exist only once the engine was made, and shards on a host,
    # which their parameters refer to only once they are watched.
    same = [SameShare(share.group, share.replicas, share.index_of) for share in shares]
    record_(chunks, records, dict(zip(each, same, strict=True)))
    if abstract and filler is None:
        Unwritten(module, [tensor for tensor in abstract if not tensor.is_meta], engine.reset)
    return module, optimizer


def sync_module_states_(
    module: nn.Module,
    *,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    expert_groups: Sequence[DataParallelGroup] = (),
) -> nn.Module:
    """Broadcast the first rank's parameters and buffers to all ranks, in place. Collective.

    `shard` does this itself. Call it for a module without trained parameters, such as a teacher.

    Args:
        module: Module on its device.
        group: Data-parallel ranks.
        replicas: Ranks that hold the same shard, as for `shard`.
        expert_groups: Data-parallel groups of parameters that only some ranks hold, as for `shard`.

    Returns:
        The module.
    """
    make_rest_alike_(module, set(), [DataParallelGroup(group, replicas), *expert_groups], device_of(module, None))
    return module


def _plan_offload(
    model: ModelPlan, offload: Offload, shares: Sequence[DataParallelGroup]
) -> tuple[Offload, OffloadPlan | None]:
    """Return the options with tiers in place of "auto", and the plan of what is offloaded; None if nothing is."""
    sharers = [group for share in shares for group in share.groups]
    if offload.auto or set(offload.budgets) - {"device"}:
        offload = fit_to_budgets(model, offload, sharers)
    if not offload.offloaded:
        return offload, None
    # A rank may fail to create its file, and then all ranks raise an error.
    with together("shard(offload=...)", *sharers):
        return offload, plan_offload(model, offload)


def _pack_filled_(
    plans: Sequence[ChunkPlan],
    filler: Filler,
    pack_: Callable[[ChunkPlan], Chunk],
    sharers: Sequence[dist.ProcessGroup],
) -> list[Chunk]:
    """Fill one unit after the other, and pack every chunk whose parameters are all filled.

    After each unit the ranks agree on whether to continue: an all-gather of short texts over each group.
    """
    chunks: dict[ChunkPlan, Chunk] = {}
    for number in filler.order:
        try:
            # Packing broadcasts, so all ranks must know that every rank has filled the unit.
            with together("init_fn", *sharers):
                filler.fill_(number)
        except Exception as error:
            # A module that is sharded in part cannot be sharded again, and this attribute makes `shard` raise an error.
            setattr(filler.root, ENGINE, None)
            error.add_note("shard() has stopped half-way; make the module and its optimizer anew")
            raise
        for plan in plans:
            if plan not in chunks and all(filler.has(member.parameter) for member in plan.members):
                chunks[plan] = pack_(plan)
    return [chunks[plan] for plan in plans]


def _bring_rest_(
    module: nn.Module,
    abstract: Iterable[torch.Tensor],
    place: torch.device,
    device: torch.device | None,
    *,
    packed: Set[nn.Parameter],
    shares: Sequence[DataParallelGroup],
) -> None:
    """Move tensors that are not packed to their device, and make them equal on all ranks.

    Args:
        module: Module, most of which is packed.
        abstract: Tensors on the meta device that no function fills. Buffers that no state dict contains stay there,
            which marks the buffers for a load to create.
        place: Device of these tensors.
        device: Device of all other tensors; None: they are not moved.
        packed: Packed parameters.
        shares: Data-parallel groups.
    """
    unsaved = unsaved_buffers(module)
    for tensor in abstract:
        if tensor.is_meta and not any(tensor is buffer for buffer in unsaved):
            make_real_(tensor, torch.zeros_like(tensor, device=place))
    for _, tensor in tensors_of(module):
        if device is not None and not tensor.is_meta:
            # Packed parameters are on the device already, so this does not move them.
            tensor.data = tensor.data.to(device)
    keep_packed_weights_(module)
    make_rest_alike_(module, packed, shares, place)


def _communicators(
    shares: Sequence[DataParallelGroup],
    used: Sequence[bool],
    stage: int,
    options: ShardOptions,
    gathers: dist.ProcessGroup | None,
) -> tuple[Groups, ...]:
    """Return the communicators of each data-parallel group, with the divisor of gradients.

    Args:
        shares: Data-parallel groups. The loss is a mean over the ranks of the first group.
        used: Whether chunks of another module use a communicator of each group.
        stage: Number of the ZeRO stage.
        options: Options that specify whether gradients are divided.
        gathers: Communicator on which the first group gathers. None: it is made.
    """
    calls = ModuleCalls(shares[0].group, abort)
    ranks = math.prod(dist.get_world_size(group) for group in shares[0].groups)
    return tuple(
        communicators(
            share,
            gathers=None if number else gathers,
            # Experts receive the tokens of all ranks over which the loss is a mean, so all groups have one divisor.
            divisor=(share.divisor or ranks) if options.precision.reduce_op == "mean" else None,
            gathers_apart=STAGES[stage].shards_parameters,
            anew=anew,
            calls=calls,
        )
        for number, (share, anew) in enumerate(zip(shares, used, strict=True))
    )


def _unconnected(
    each: Sequence[Groups],
    given: Sequence[dist.ProcessGroup | None],
    tensor: dist.ProcessGroup | None,
    device: torch.device,
) -> list[dist.ProcessGroup]:
    """Return the communicators that a step may be the first to use, in one order on all ranks.

    These are the communicators that `shard` made, and given ones that their owner may not have used yet. Gloo connects
    a communicator when it is made.
    """
    used = [group for one in each for group in (*one.both, one.gathers)]
    used += [] if tensor is None else [tensor]
    made = [group for group in used if group not in given and group is not tensor]
    return [group for group in dict.fromkeys(used) if group in made or backend_of(group, device.type) != "gloo"]
