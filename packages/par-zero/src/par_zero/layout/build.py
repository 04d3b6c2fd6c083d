"""Chunks made from a module's parameters: first a plan assigns parameters to chunks, then each chunk is packed."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Sharding, kept_tensors, original_name

from .._param_groups import ParamGroup
from .._policies import ShardOptions
from .._stage import ZeroStage
from .chunk import Chunk
from .fill import make_real_
from .packing import PackedItem, pack, pack_atomic
from .plan import ChunkPlan, Member
from .records import is_assembled, own_record
from .sharers import DataParallelGroup, Groups
from .units import places


def members_of(
    module: nn.Module,
    groups: Sequence[ParamGroup],
    stage: ZeroStage,
    units: Sequence[Sequence[nn.Module]],
    *,
    shares: Sequence[DataParallelGroup] = (),
    tensor: Sequence[int] = (),
    param_dtype: torch.dtype | None = None,
) -> list[Member]:
    """Return the parameters that are packed in chunks.

    At stage 3 these are all parameters. Below stage 3 they are the parameters of the optimizers, or, without an
    optimizer, all parameters that require gradients.

    Args:
        module: Module.
        groups: Param groups of all optimizers of the module.
        stage: ZeRO stage.
        units: FSDP units, as `choose_units` returns them.
        shares: Data-parallel groups. Empty: all parameters belong to one group.
        tensor: Ranks that may hold other shards of a parameter.
        param_dtype: Dtype in which the module computes with its parameters. None: the dtype of each parameter.

    Raises:
        ValueError: A parameter belongs to no data-parallel group, or must be assembled and does not belong to the
            first.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # A tied parameter has several names, and a state dict may contain any of them.
        names.setdefault(parameter, []).append(original_name(name))
    numbers = {parameter: number for number, group in enumerate(groups) for parameter in group.settings["params"]}
    kept = set() if param_dtype is None else {id(each) for each in kept_tensors(module, param_dtype).values()}
    place_of, members = places(module, units), []
    for parameter, all_names in names.items():
        number = numbers.get(parameter, -1)
        if number >= 0:
            owner, atomic = groups[number].owner, groups[number].atomic
        elif stage.shards_parameters or (not groups and parameter.requires_grad):
            owner, atomic = -1, False
        else:
            continue
        assembled = atomic and is_assembled(parameter, tensor)
        members.append(
            Member(
                parameter=parameter,
                names=tuple(dict.fromkeys(all_names)),
                group=number,
                owner=owner,
                atomic=atomic,
                assembled=assembled,
                share=_share_of(parameter, all_names[0], shares, assembled=assembled) if shares else 0,
                place=place_of[parameter],
                shape=parameter.shape,
                kept=id(parameter) in kept,
            )
        )
    return members


def _share_of(parameter: nn.Parameter, name: str, shares: Sequence[DataParallelGroup], *, assembled: bool) -> int:
    """Return the index of the data-parallel group of a parameter: the group that lists it, or the first that fits.

    A group fits if all its ranks hold a replica by the parameter's sharding metadata.

    Raises:
        ValueError: Some ranks of the group hold no replica, or the parameter must be assembled in another group than
            the first.
    """
    record, naming = own_record(parameter), _naming(parameter, shares)
    if record is None and not naming:
        return 0
    if record is None:
        raise ValueError(
            f"expert_groups[{naming[0] - 1}].parameters: {name!r} has no sharding metadata, which lists the ranks that "
            "hold it; attach it with par_groups.set_sharding"
        )
    candidates = naming or [n for n, share in enumerate(shares) if share.parameters is None]
    found = shares_of(parameter, shares)
    if not found:
        holders = sorted({rank for box in record.boxes for rank in box.copies})
        near = " or ".join(str(shares[n].near) for n in candidates)
        raise ValueError(
            f"{name!r} is held by the ranks {holders}, which are not all of the ranks {near} that would shard it, and "
            "the other ranks would get this rank's values; pass expert_groups=[par_zero.DataParallelGroup(group)] with "
            "the group of the ranks that hold it"
        )
    if assembled and found[0]:
        raise ValueError(
            f"{name!r} belongs to expert_groups[{found[0] - 1}], and its optimizer needs a full tensor, of which this "
            "rank holds a shard; use an elementwise optimizer for it, or make each matrix a parameter"
        )
    return found[0]


def _naming(parameter: nn.Parameter, shares: Sequence[DataParallelGroup]) -> list[int]:
    return [n for n, share in enumerate(shares) if any(parameter is each for each in share.parameters or ())]


def shares_of(parameter: nn.Parameter, shares: Sequence[DataParallelGroup]) -> list[int]:
    """Return the indices of the data-parallel groups whose ranks all hold a replica of a parameter.

    The parameter belongs to the first of these groups, if there is one. A parameter without sharding metadata belongs
    to the first group, unless another group lists it.
    """
    record, naming = own_record(parameter), _naming(parameter, shares)
    if record is None:
        return [] if naming else [0]
    candidates = naming or [n for n, share in enumerate(shares) if share.parameters is None]
    found = [n for n in candidates if shares[n].has_copies(record)]
    return [0] if not found and not naming and _is_of_one_device(record) else found


def _is_of_one_device(record: Sharding) -> bool:
    """Return whether sharding metadata describes a full tensor that only this rank holds.

    A layer that was made for one device has such metadata, which cannot list the ranks of later replicas of the model.
    """
    mine = {dist.get_rank()}
    return record.local_numel == record.numel and all(set(box.copies) == mine for box in record.boxes)


def plan_chunks(
    members: Sequence[Member],
    records: Mapping[nn.Parameter, Sharding],
    stage: ZeroStage,
    ranks: Sequence[int],
    options: ShardOptions,
    *,
    tensor: int = 1,
) -> list[ChunkPlan]:
    """Assign parameters to chunks, from the last parameter to the first, because the last gradients arrive first.

    The parameters of a chunk have the same data-parallel group, unit, dtype, device and dtype of computation. Either
    one optimizer has all of them, or none is trained. A parameter that ranks of other axes replicate is packed
    separately from the parameters that they shard. All of these ranks then shard the replica at the same positions. The
    chunks of all data-parallel groups have one common order.

    Args:
        members: Parameters. At stage 3 those of one kind in a unit form one chunk.
        records: Sharding metadata of the parameters before `shard` shards them.
        stage: ZeRO stage.
        ranks: Number of ranks of each data-parallel group.
        options: Options with the size of a chunk. A chunk of full parameters for an atomic optimizer is larger if it
            would hold too few large parameters for the number of ranks.
        tensor: Number of ranks that hold the shards of assembled parameters. All of them make the same plan for these.
    """
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for member in reversed(members):
        parameter = member.parameter
        trained = member.group >= 0 or parameter.requires_grad
        copies = frozenset(rank for box in records[parameter].boxes for rank in box.copies)
        stepped = (trained, member.owner, member.atomic, member.assembled, member.kept)
        where = (member.share, member.place, parameter.dtype, parameter.device)
        # Tensor-parallel ranks hold different shards of an assembled parameter, so their metadata must not separate
        # what they assign identically.
        kind = (*where, *stepped, None if member.assembled else copies)
        kinds.setdefault(kind, []).append(member)

    def numel(member: Member) -> int:
        return -(-records[member.parameter].numel // tensor) if member.assembled else member.shape.numel()

    def item(member: Member) -> PackedItem:
        weight = records[member.parameter].numel if member.assembled else 0
        return PackedItem(numel=member.shape.numel(), group=member.group, weight=weight)

    def wastes(part: Sequence[Member]) -> bool:
        """Return whether full parameters fill the ranks so unevenly that a quarter of the chunk is padding."""
        if not part[0].atomic:
            return False
        # Full sizes are equal on all tensor-parallel ranks, so all of them make the same buckets.
        items = [PackedItem(numel=records[member.parameter].numel, group=0) for member in part]
        layout = pack_atomic(items, ranks[part[0].share])
        return layout.padding > layout.size / 4

    parts = [
        # Buckets are filled from the last parameter, but a chunk stores parameters in the module's order.
        part[::-1]
        for kind in kinds.values()
        for part in (
            [kind]
            if stage.shards_parameters
            else _buckets(kind, options.overlap.bucket_of(ranks[kind[0].share]), numel, wastes)
        )
    ]
    plans = []
    # Elements of each rank so far. Assembled parameters have counts of their own, because tensor-parallel ranks must
    # assign them identically, and the other parameters of these ranks may differ.
    dealt = {(share, each): [0] * count for share, count in enumerate(ranks) for each in (False, True)}
    for part in parts:
        items = [item(member) for member in part]
        among, kind_of_deal = ranks[part[0].share], (part[0].share, part[0].assembled)
        layout = pack(items, among)
        if part[0].atomic:
            before = dealt[kind_of_deal]
            layout = pack_atomic(items, among, before)
            dealt[kind_of_deal] = [own + more for own, more in zip(before, layout.loads(items), strict=True)]
        plans.append(
            ChunkPlan(
                members=tuple(part),
                layout=layout,
                precision=options.precision,
                most=layout.size,
                most_kept=layout.shard,
            )
        )
    first = {member.parameter: position for position, member in enumerate(members)}
    # A chunk is complete when the first of its parameters has its gradient, and chunks are reduced in one order.
    return sorted(plans, key=lambda plan: -min(first[member.parameter] for member in plan.members))


def _buckets(
    members: Iterable[Member],
    limit: int,
    numel: Callable[[Member], int],
    wastes: Callable[[Sequence[Member]], bool],
) -> list[list[Member]]:
    """Join neighbours until they have `limit` bytes, and more if a chunk of them would waste memory.

    Args:
        members: Parameters.
        limit: Bytes per bucket.
        numel: Function that returns the number of elements of a parameter.
        wastes: Function that returns whether a chunk of some parameters would have too much padding.
    """
    buckets: list[list[Member]] = [[]]
    size = 0
    for member in members:
        if size >= limit and not wastes(buckets[-1]):
            buckets.append([])
            size = 0
        buckets[-1].append(member)
        size += numel(member) * member.parameter.element_size()
    # The last bucket cannot grow any more, so the bucket before takes its parameters.
    if len(buckets) > 1 and wastes(buckets[-1]):
        buckets[-2:] = [[*buckets[-2], *buckets[-1]]]
    return buckets


def pack_chunk_(
    plan: ChunkPlan,
    groups: Groups,
    stage: ZeroStage,
    device: torch.device | None,
    make_alike: Callable[[torch.Tensor], None],
) -> Chunk:
    """Make a chunk, move its parameters into it, and free the memory that they had.

    Parameters on the meta device become real, filled with zeros. The peak memory is one full chunk in addition to the
    parameters of the chunk.

    Args:
        plan: Plan of the chunk.
        groups: Communicators of its data-parallel group.
        stage: ZeRO stage.
        device: Device of the chunk. None: the device of its parameters.
        make_alike: Function that overwrites the full buffer with the first rank's values, on all ranks.
    """
    first = plan.members[0].parameter
    abstract = first.is_meta
    # Padding is zero, because slices include it and the optimizer steps it, too.
    packed = torch.zeros(plan.layout.size, dtype=first.dtype, device=device or first.device)
    with torch.no_grad():
        for member, (start, stop) in zip(plan.members, plan.layout.slots, strict=True):
            view = packed[start:stop].view(member.shape)
            if abstract:
                make_real_(member.parameter, view)
            else:
                view.copy_(member.parameter)
                # Each parameter frees its own memory here, before `Chunk` allocates more.
                member.parameter.data = view
    if not abstract:
        make_alike(packed)
    return Chunk(plan, groups, stage, packed)
