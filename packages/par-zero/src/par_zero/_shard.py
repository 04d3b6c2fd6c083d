"""`shard`: one call makes an ordinary module and its optimizer data-parallel, without duplicates."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import Sharding, backend_of, together

from ._check import (
    ENGINE,
    agreed,
    agreed_chunks,
    check,
    check_abstract,
    check_backends,
    check_groups,
    check_offload,
    check_others,
    described,
)
from ._collectives import communicators, connect, is_in_use
from ._engine import Engine
from ._options import Fill, ShardOptions, Units
from ._param_groups import Atomic, Elementwise, ParamGroup, in_a_row, param_groups
from ._stage import STAGES
from ._tiers import Offload, offload_of
from ._torch_private import unsaved_buffers
from ._unit import Unit
from .layout.alike import make_rest_alike_
from .layout.build import Plan, members_of, pack_chunk_, plan_chunks
from .layout.chunk import Chunk
from .layout.fill import Filler, device_of, make_real_
from .layout.records import SameShare, record_, record_of
from .layout.sharers import Groups, Share, Sharers
from .layout.units import Place, choose_units, places, tensors_of, unit_names
from .layout.unwritten import Unwritten
from .offload.away import Away, bring_away_, plan_away, plan_room
from .offload.budget import within_budgets
from .offload.stream import OnDisk
from .optimizer.agreement import agreed_blocks
from .optimizer.assembly import assemble
from .placement.moments import Trace
from .residency.table import Residency


def shard(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    others: Sequence[Share] = (),
    units: Units = "auto",
    bucket: int | Literal["auto"] = 10_000_000,
    inflight: int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce: str = "mean",
    atomic: Atomic = False,
    elementwise: Elementwise = False,
    share_of: Callable[[int], int] | None = None,
    gathers: dist.ProcessGroup | None = None,
    tensor: dist.ProcessGroup | None = None,
    fill: Fill | None = None,
    device: torch.device | None = None,
    offload: Offload | Mapping[str, object] | None = None,
) -> tuple[nn.Module, Optimizer | Sequence[Optimizer] | None]:
    """Makes a module and its optimizer data-parallel over a group, in place. Collective.

    They stay an ordinary nn.Module and torch.optim.Optimizer: `loss.backward(); optimizer.step()`. The first rank's
    parameters and buffers become those of all ranks, frozen ones too; from then on, buffers are each rank's own. The
    optimizer comes to hold flat slices; the dicts of its param groups stay the objects that they were. Parameters are
    packed one chunk after the other, and what is packed gives its memory back: there is never more than what is packed,
    what is not yet, and one chunk.

    Args:
        module: The module, on its device or on the meta device. Of a ModuleList or ModuleDict the items are called, in
            any order, such as an actor and a critic that share an optimizer; `no_sync`, `summon` and `reset` of an item
            are those of all.
        optimizer: An optimizer that has all of the module's parameters that want gradients, and has not stepped; or a
            list of several that have each of them once, such as Muon for matrices and AdamW for the rest, or a
            `par_groups.JointOptimizer` of these. None if the module is only run.
        stage: What is not kept twice: 0 nothing (what DistributedDataParallel does), 1 the optimizer's state,
            2 gradients too, 3 parameters too.
        group: The ranks with different data that share the work.
        replicas: The ranks that keep the same share, for hybrid sharding. None: no others do.
        others: Who shares parameters that not all of these ranks have, such as experts, of which each rank has some:
            [Share(groups["data", "expert_data"])]. A parameter that none of them names belongs to the first of `group`
            and these whose ranks, with its replicas, all have copies of it by its record (`par_groups.Sharding`), and
            is refused if there is none. Stage, units and options are those of the call, and all chunks are reduced in
            one order.
        units: Which modules are gathered by themselves at stage 3. "auto": the items of every ModuleList, ModuleDict
            and Sequential, small neighbours together. Or a function that is True of a module that is a unit, or a list
            of the modules.
        bucket: Bytes of parameters that are reduced as one, such as 10_000_000; or "auto", for what `bucket_bytes` says
            of the ranks that share: 25 MB or more, and more the more ranks there are.
        inflight: Number of chunks whose reductions may be under way in backward, before it waits for the oldest: so
            much memory reductions take at most. None: two where a GPU waits in the order of its work, else any number;
            with `others` any number. Where backward itself exchanges with other ranks, and data decides which
            parameters get gradients on a rank, let it be None on a CPU, and on a GPU as many as there are chunks: a
            rank that waits inside of backward may wait for one that waits for it. With fewer and `others`, stages 0 to
            2 reduce a chunk when it is complete, and not when backward has left it behind on all ranks.
        param_dtype: Dtype of the parameters in use, such as torch.bfloat16, while the optimizer keeps copies in their
            original dtype. None: the original dtype.
        reduce_dtype: Dtype in which gradients are added up over microbatches and ranks. None: the parameters' dtype.
        reduce: "mean" or "sum" of the gradients over the ranks. The mean divides by the number of ranks of `group` and
            `replicas`, and so it does for what `others` share, of whom each may name another divisor.
        atomic: Whether each parameter stays whole on one rank. True: all; or a function that says so of a param group,
            which it gets as the dict that it is, such as `lambda group: "matrices" in group`. Optimizers of known
            classes that need whole tensors, such as Muon and Adafactor, have them without it.
        elementwise: Whether an optimizer treats each element by itself, as Adam does, so that it can step flat slices.
            It is for classes that par-zero does not know, such as your own; a trial checks it. True: all; or a function
            that says so of a param group. Without it, an unknown optimizer steps whole tensors, each on one rank.
        share_of: The number of the share that a rank of the world keeps: its position in its own `group`, such as
            `lambda rank: topology.index("data", rank)`. For parameters that ranks outside of `group` and `replicas`
            have copies of, such as a bias of a tensor group; None: the ranks ask each other, which takes longer.
        gathers: Another communicator of the ranks of `group`, in the same order, over which stage 3 gathers alone, such
            as `groups.channels("data", 1)[0]`, which ends with its owner. None: one is made, which ends with
            torch.distributed.
        fill: Makes a module real that is on the meta device, just before it is packed, so that the whole model is never
            there: it is called with a unit and what comes before its names, such as "blocks.0.", and at last with the
            module, which has then what is in no unit alone. `par_layers.initialize` with a seed is such a function.
            Parameters stay the objects that they are, and keep shape and dtype; buffers are to be filled too. None:
            what is on the meta device gets memory but no values, and has to be loaded before the module runs; buffers
            that no state dict has stay there, for the load to make them.
        device: Where parameters and buffers come to lie. None: where they are, or where `fill` puts them; without
            `fill`, what is on the meta device comes to the device of the rest, or else torch's default device.
        tensor: The ranks that have the other parts of parameters that are cut, such as a tensor group. What is atomic
            and cut is put together over them, for one of them to step; of parameters with a record of several boxes,
            such as q, k and v in one weight, each is a tensor by itself. A gradient whose record says that it is a
            partial sum is summed over all of these ranks that have a copy. None: such parameters are refused.
        offload: Which part of the optimizer's state, and at stage 3 of parameters and gradients, lies elsewhere, such
            as Offload(optimizer="disk", path="/scratch"), or a mapping of its arguments. It changes no number.
            Parameters are on a CPU then. None: nothing does.

    Returns:
        The module, and what was given as optimizer.

    Raises:
        Exception: What `fill` has raised on this rank. The module is half sharded then; make it and its optimizer anew.
        ValueError, TypeError: What cannot be sharded, and what differs between the ranks; on every rank.
        OSError: The file for state on a disk cannot be made.
    """
    problem: Exception | None = None
    members, options, modules, optimizers, parts = [], ShardOptions(), [[module]], list[Optimizer](), [0]
    place_of: dict[nn.Parameter, Place] = {}
    abstract: dict[torch.Tensor, str] = {}  # what is on the meta device
    filler: Filler | None = None
    tiers, stepped = Offload(), list[ParamGroup]()
    known = [share for share in others if isinstance(share, Share)] if isinstance(others, Sequence) else []
    shares = [Share(group, replicas), *known]  # all agree below on what else it is
    sharers = [each for share in shares for each in share.groups]
    try:
        options = ShardOptions(
            units=units,
            bucket=bucket,
            inflight=inflight,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reduce=reduce,
            atomic=atomic,
            elementwise=elementwise,
        )
        optimizers = in_a_row(optimizer)
        stepped = param_groups(optimizers, options.atomic, options.elementwise)
        tiers = offload_of(offload)
        check(module, stepped, stage, tensor, in_pieces=tiers.uses_disk, ranks=_most_ranks(shares))
        check_others(others, shares[0], module, options)
        check_offload(tiers, module, stepped, stage, device)
        check_groups(group, replicas, gathers, tensor)
        check_abstract(module, fill, device, sharers)
        _check_share_of(share_of, group)
        unit_bytes = options.bucket_of(dist.get_world_size(group))
        if STAGES[stage].shards_parameters:
            modules = choose_units(module, units, unit_bytes)
        abstract = {each: name for name, each in tensors_of(module) if each.is_meta}
        if abstract and fill is not None:
            filler = Filler(module, choose_units(module, units, unit_bytes), fill)
        place_of = places(module, modules)
        parts = [dist.get_rank()] if tensor is None else dist.get_process_group_ranks(tensor)
        members = members_of(module, stepped, STAGES[stage], shares, parts)
        if not members:
            raise ValueError(
                f"the {type(module).__name__} has no parameters to shard; give one that has, or leave it alone"
            )
    except Exception as error:  # of any type, such as of the caller's function for units: the others wait for this rank
        problem = error
    given = (
        *(share_of is None, gathers is None, tensor is None, tiers.auto, tiers.furthest.parts),
        *(tiers.furthest.parameter_parts, tiers.furthest.gradient_parts, tiers.piece_bytes, tiers.overlap),
        *(tiers.budgets, tiers.policy, list(abstract.values()), filler is None, getattr(device, "type", None)),
    )
    texts = [f"{described(members, place_of, stage, options, number)} {given}" for number in range(len(shares))]
    parameters = [member.parameter for member in members]
    ranks: tuple[int, ...] = ()
    used: tuple[bool, ...] = ()
    records: dict[nn.Parameter, Sharding] = {}
    plans: list[Plan] = []
    away: Away | None = None
    reach: tuple[bool, ...] = (True,)
    try:
        own_use = [is_in_use([*share.groups, None if number else gathers]) for number, share in enumerate(shares)]
        ranks, used = agreed(problem, texts, shares, own_use)
        records = {parameter: record_of(parameter, ranks) for parameter in parameters}
        counts = [dist.get_world_size(share.group) for share in shares]
        plans = plan_chunks(members, place_of, records, STAGES[stage], counts, options, tensor=len(parts))
        plans, reach = agreed_chunks(plans, shares)
        tiers, away = _planned_away(tiers, plans, stepped, stage, options, shares=shares, module=module, device=device)
    except Exception as error:  # the ranks of the tensor group wait for this one
        if tensor is None:
            raise
        problem = error
    blocks = agreed_blocks(problem, plans, records, ranks, tensor, STAGES[stage])
    together_with = sharers if tensor is None else [*sharers, tensor]
    room = plan_room(plans, stepped, options, tiers, _ranks_in(shares), together_with)
    place = device_of(module, device)
    first = members[0].parameter
    check_backends(sharers, place if first.is_meta else torch.device(device or first.device), stage)
    each = _communicators(shares, used, stage, options, gathers)

    def pack_(plan: Plan) -> Chunk:
        where = place if plan.members[0].parameter.is_meta else device
        make_alike = partial(_make_alike_, share=shares[plan.share])
        chunk = pack_chunk_(plan, each[plan.share], STAGES[stage], options, where, make_alike)
        bring_away_(away, plans.index(plan), chunk)
        return chunk

    chunks = [pack_(plan) for plan in plans] if filler is None else _pack_filled_(plans, filler, pack_, sharers)
    _bring_rest_(module, () if filler is not None else abstract, place, device, packed=set(parameters), shares=shares)
    where = chunks[0].own.device
    connect(_unconnected(each, [*sharers, gathers], tensor, where), where)
    gathered = [
        Unit(
            number,
            name,
            unit,
            [chunk for chunk in chunks if place_of[chunk.members[0].parameter].unit == number],
        )
        for number, (name, unit) in enumerate(zip(unit_names(module, modules), modules, strict=True))
    ]
    alike = (dist.get_rank(),) if replicas is None else tuple(dist.get_process_group_ranks(replicas))
    assemblies = assemble(chunks, blocks, tensor, alike if STAGES[stage].shards_state else ranks)
    engine = Engine(
        module,
        optimizers,
        chunks,
        STAGES[stage],
        Sharers(each=each, reach=reach),
        gathered,
        assemblies=assemblies,
        inflight=inflight,
        away=away,
        room=room,
    )
    record_(chunks, records, _same_shares(shares, each, share_of))
    engine.watch(parameters)
    if abstract and filler is None:
        Unwritten(module, [tensor for tensor in abstract if not tensor.is_meta], engine.reset)
    return module, optimizer


def no_sync(module: nn.Module, *, keep: bool = True) -> AbstractContextManager[None]:
    """Backward passes inside add up gradients on each rank; the first one outside reduces them all together.

    At stages 2 and 3 this takes a whole gradient's memory, as at stage 1.

    Args:
        module: What was given to `shard`, or an item of it that is called.
        keep: At stage 3, whether parameters that are gathered stay so for the passes that follow, which takes a whole
            model's memory. Else every pass gathers them anew, as outside, and frees them.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).no_sync(keep=keep)


def make_alike_(
    module: nn.Module,
    *,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    others: Sequence[Share] = (),
) -> nn.Module:
    """Gives all ranks the first rank's parameters and buffers. Collective.

    `shard` does so itself. It is for a module that has no parameter to train, such as a teacher.

    Args:
        module: The module, on its device.
        group: The ranks with different data.
        replicas: As for `shard`.
        others: As for `shard`.

    Returns:
        The module.
    """
    make_rest_alike_(module, set(), [Share(group, replicas), *others], device_of(module, None))
    return module


def summon(module: nn.Module) -> AbstractContextManager[None]:
    """Whole parameters inside, at stage 3 too; what is written to them is kept. Collective.

    At stages 1 and 2 it waits for what the latest step has begun to gather. Otherwise that is done by whoever reads a
    parameter through torch's functions; enter this before something reads the memory itself, such as a captured graph.

    Args:
        module: What was given to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
        RuntimeError: At the end, where a parameter was replaced inside instead of written in place.
    """
    return _engine_of(module).summon()


def residency(module: nn.Module) -> Residency:
    """Where the bytes of a sharded module lie: by tier and kind, now and at the fullest moment of the latest step.

    Printed, it is a table. Nothing waits, and no rank asks another. What autograd keeps of a forward is not counted,
    nor a copy that `summon` makes of parameters to see which are written.

    Args:
        module: What was given to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).residency()


def on_disk(module: nn.Module) -> OnDisk:
    """What a rank has of optimizers on a disk, in which pieces, and how fast that is now: some are read and written.

    It waits for what the latest step writes. Ranks that share a disk call it at the same time, to see what each gets.

    Args:
        module: What was given to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
        OSError: The disk has failed.
    """
    return _engine_of(module).on_disk()


def recall(module: nn.Module, size: int) -> int:
    """Brings the optimizers' state back from the disk for good, piece by piece, as far as it has room. Between steps.

    Each rank may bring back what it likes, and no number changes. What was brought back is stepped with what is in
    memory; its place in the file stays reserved.

    Args:
        module: What was given to `shard`, or an item of it that is called.
        size: Bytes that it may take. At first comes what a step waits for most.

    Returns:
        Bytes that it takes.

    Raises:
        ValueError: The module is not sharded, or fewer than no bytes.
    """
    if size < 0:
        raise ValueError(f"size is {size} bytes; give 0 or more")
    return _engine_of(module).recall(size)


def trace(module: nn.Module) -> Trace | None:
    """What the last whole step has needed on this rank, for `place`.

    Args:
        module: What was given to `shard` at stage 3 with a budget, such as offload=Offload(budget="80GB").

    Returns:
        The trace; None before there was a whole step, and without a budget, where nothing is recorded.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).trace


def reset(module: nn.Module) -> None:
    """Drops half-made gradients after an exception in forward or backward, so that the next step is right.

    Args:
        module: What was given to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
    """
    _engine_of(module).reset()


def _engine_of(module: nn.Module) -> Engine:
    engine = getattr(module, ENGINE, None)  # what torch.compile returns has the attributes of the module inside
    if not isinstance(engine, Engine):
        raise ValueError(f"this {type(module).__name__} is not sharded; give what was given to shard()")
    return engine


def _planned_away(
    offload: Offload,
    plans: Sequence[Plan],
    stepped: Sequence[ParamGroup],
    stage: int,
    options: ShardOptions,
    *,
    shares: Sequence[Share],
    module: nn.Module,
    device: torch.device | None,
) -> tuple[Offload, Away | None]:
    """Which part of what lies in which tier, as far as nobody has said; and what lies elsewhere, if anything does."""
    if offload.auto or set(offload.budgets) - {"device"}:
        offload = within_budgets(
            offload,
            plans,
            stepped,
            STAGES[stage],
            options,
            shares=shares,
            beside=_bytes_beside(module, [member.parameter for plan in plans for member in plan.members]),
            is_on_cpu=device_of(module, device).type == "cpu",
        )
    if not offload.away:
        return offload, None
    with together("shard(offload=...)", *(group for share in shares for group in share.groups)):
        return offload, plan_away(plans, stepped, STAGES[stage], _ranks_in(shares), offload, options)


def _most_ranks(shares: Sequence[Share]) -> tuple[int, int]:
    """Over how many ranks parameters are sharded at most, and how many ranks step the same share at most."""
    copies = [1 if share.replicas is None else dist.get_world_size(share.replicas) for share in shares]
    return max(dist.get_world_size(share.group) for share in shares), max(copies)


def _ranks_in(shares: Sequence[Share]) -> list[int]:
    """For each of those who share, which part is this rank's."""
    return [dist.get_rank(share.group) for share in shares]


def _bytes_beside(module: nn.Module, packed: Iterable[nn.Parameter]) -> int:
    """Bytes of a module's parameters and buffers that are not packed."""
    own = {id(tensor): tensor.nbytes for _, tensor in tensors_of(module)}
    return sum(own.values()) - sum(own[id(parameter)] for parameter in packed)


def _pack_filled_(
    plans: Sequence[Plan],
    filler: Filler,
    pack_: Callable[[Plan], Chunk],
    sharers: Sequence[dist.ProcessGroup],
) -> list[Chunk]:
    """Fills one unit after the other, and packs every chunk whose parameters are all there.

    After each unit the ranks agree on whether to go on: an all-gather of short texts over each group.
    """
    chunks: dict[Plan, Chunk] = {}
    for number in filler.order:
        try:
            with together("fill", *sharers):
                filler.fill_(number)
        except Exception as error:
            setattr(filler.root, ENGINE, None)  # so that nobody shards what is left of it
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
    shares: Sequence[Share],
) -> None:
    """Brings parameters and buffers that are not packed to their device, and makes them alike on all ranks.

    Args:
        module: The module, most of which is packed.
        abstract: What was on the meta device, and nobody fills. Buffers that no state dict has stay there: a load knows
            by that which it has to make.
        place: Where that gets memory.
        device: Where all the rest goes; None: it stays where it is.
        packed: The parameters that are packed.
        shares: Who shares what.
    """
    unsaved = unsaved_buffers(module)
    for tensor in abstract:
        if tensor.is_meta and not any(tensor is buffer for buffer in unsaved):
            make_real_(tensor, torch.zeros_like(tensor, device=place))
    for _, tensor in tensors_of(module):
        if device is not None and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
    make_rest_alike_(module, packed, shares, place)


def _make_alike_(packed: torch.Tensor, *, share: Share) -> None:
    """Gives all ranks of a share the first one's values of a buffer. A broadcast over each of its groups."""
    for group in share.groups:
        if dist.get_world_size(group) > 1:
            dist.broadcast(packed, group=group, group_src=0)


def _check_share_of(share_of: Callable[[int], int] | None, group: dist.ProcessGroup) -> None:
    """Checks that a function of a rank says of this one at least what is so."""
    rank, place = dist.get_rank(), dist.get_rank(group)
    if share_of is not None and share_of(rank) != place:
        raise ValueError(
            f"share_of({rank}) is {share_of(rank)!r}, but this rank is number {place} of its group; give the position "
            "of each rank in its own group, or leave share_of out"
        )


def _same_shares(
    shares: Sequence[Share], each: Sequence[Groups], share_of: Callable[[int], int] | None
) -> dict[Groups, SameShare]:
    """Which ranks keep the same share, by who shares it. `share_of` knows that of the first."""
    known = [share_of, *(None for _ in shares[1:])]
    same = [SameShare(share.group, share.replicas, told) for share, told in zip(shares, known, strict=True)]
    return dict(zip(each, same, strict=True))


def _communicators(
    shares: Sequence[Share],
    used: Sequence[bool],
    stage: int,
    options: ShardOptions,
    gathers: dist.ProcessGroup | None,
) -> tuple[Groups, ...]:
    """The communicators of each share, and by what gradients are divided on them.

    Args:
        shares: Who shares what; the loss is a mean over the ranks of the first.
        used: For each share, whether another module's chunks go over any of its groups.
        stage: The ZeRO stage.
        options: Whether gradients are divided.
        gathers: That over which the first share gathers. None: one is made.
    """
    ranks = math.prod(dist.get_world_size(group) for group in shares[0].groups)
    return tuple(
        communicators(
            share,
            gathers=None if number else gathers,
            divisor=(share.divisor or ranks) if options.reduce == "mean" else None,
            gathers_apart=STAGES[stage].shards_parameters,
            anew=anew,
        )
        for number, (share, anew) in enumerate(zip(shares, used, strict=True))
    )


def _unconnected(
    each: Sequence[Groups],
    given: Sequence[dist.ProcessGroup | None],
    tensor: dist.ProcessGroup | None,
    device: torch.device,
) -> list[dist.ProcessGroup]:
    """The communicators that a step may be the first to use, in one order on all ranks.

    Those that were made here, and those that were given, whose owner may have used them for nothing yet. Gloo connects
    a communicator when it is made.
    """
    used = [group for one in each for group in (*one.both, one.gathers)]
    used += [] if tensor is None else [tensor]
    made = [group for group in used if group not in given and group is not tensor]
    return [group for group in dict.fromkeys(used) if group in made or backend_of(group, device.type) != "gloo"]
