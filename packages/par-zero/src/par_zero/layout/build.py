"""Chunks out of a module's parameters: first what goes into which, then one chunk after the other is packed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Sharding, kept_tensors

from .._param_groups import ParamGroup
from .._policies import ShardOptions
from .._stage import ZeroStage
from .chunk import Chunk, Member
from .fill import make_real_
from .packing import ChunkLayout, PackedItem, pack, pack_atomic
from .records import is_assembled, own_record
from .sharers import DataParallelGroup, Groups
from .units import UnitPlace


def members_of(
    module: nn.Module,
    groups: Sequence[ParamGroup],
    stage: ZeroStage,
    shares: Sequence[DataParallelGroup] = (),
    tensor: Sequence[int] = (),
    param_dtype: torch.dtype | None = None,
) -> list[Member]:
    """The parameters that are packed.

    They are those of the optimizers; without one, those that want gradients; where parameters are sharded, all.

    Args:
        module: The module.
        groups: The param groups of all its optimizers.
        stage: The ZeRO stage.
        shares: Who shares what. Empty: all parameters belong to one share.
        tensor: The ranks that may have other parts of a parameter.
        param_dtype: Dtype of the parameters that the module computes with. None: their own dtype.

    Raises:
        ValueError: A parameter belongs to no share, or is to be put together and does not belong to the first.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    numbers = {parameter: number for number, group in enumerate(groups) for parameter in group.settings["params"]}
    kept = set() if param_dtype is None else {id(each) for each in kept_tensors(module, param_dtype).values()}
    members = []
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
                names=tuple(all_names),
                group=number,
                owner=owner,
                atomic=atomic,
                assembled=assembled,
                share=_share_of(parameter, all_names[0], shares, assembled=assembled) if shares else 0,
                shape=parameter.shape,
                kept=id(parameter) in kept,
            )
        )
    return members


def _share_of(parameter: nn.Parameter, name: str, shares: Sequence[DataParallelGroup], *, assembled: bool) -> int:
    """The number of the share that a parameter belongs to: that which names it, or else the first by its record.

    Raises:
        ValueError: Not all of those who would share it have copies, or it is to be put together beside the first share.
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
    """The numbers of the shares that have a parameter on all of their ranks; it belongs to the first of them, if any.

    Without a record, it is on all ranks of the first share, unless another one names it.
    """
    record, naming = own_record(parameter), _naming(parameter, shares)
    if record is None:
        return [] if naming else [0]
    candidates = naming or [n for n, share in enumerate(shares) if share.parameters is None]
    found = [n for n in candidates if shares[n].has_copies(record)]
    return [0] if not found and not naming and _is_of_one_device(record) else found


def _is_of_one_device(record: Sharding) -> bool:
    """Whether a record is of a layer that was made for one device: the whole tensor, and no rank but this has it.

    Such a record does not know the ranks on which copies of the model were made.
    """
    mine = {dist.get_rank()}
    return record.local_numel == record.numel and all(set(box.copies) == mine for box in record.boxes)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPlan:
    """A chunk that has no memory yet.

    Args:
        members: The parameters, which have memory of their own.
        place: Where they belong.
        layout: Where they will lie in the chunk.
        most: Elements of the chunk on the rank that has the largest there, as of experts some may have more: all ranks
            decide alike by these.
        most_kept: Elements that a rank keeps of it where parameters are sharded, on the rank that keeps most.
    """

    members: tuple[Member, ...]
    place: UnitPlace
    layout: ChunkLayout
    most: int
    most_kept: int

    @property
    def share(self) -> int:
        """Number of the share that its parameters belong to, all of them."""
        return self.members[0].share

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters, as the optimizer steps them."""
        return self.members[0].parameter.dtype

    @property
    def kept(self) -> bool:
        """Whether the module computes with its parameters in their own dtype, whatever `param_dtype` is."""
        return self.members[0].kept

    def dtype_in_use(self, options: ShardOptions) -> torch.dtype:
        """Dtype of the parameters as the module uses them; complex ones keep theirs, and their gradients too."""
        wanted = options.precision.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point and not self.kept else self.dtype


def plan_chunks(
    members: Sequence[Member],
    place_of: Mapping[nn.Parameter, UnitPlace],
    records: Mapping[nn.Parameter, Sharding],
    stage: ZeroStage,
    ranks: Sequence[int],
    options: ShardOptions,
    *,
    tensor: int = 1,
) -> list[ChunkPlan]:
    """Deals parameters out to chunks, the last first: their gradients come first.

    A chunk holds parameters of one share, place, dtype and device that are trained, by one optimizer, or that are not,
    and that the module computes with in one dtype.
    What ranks of other axes hold alike lies apart from what each of them holds for itself, so that it is cut alike
    there. All chunks have one order, whoever shares them.

    Args:
        members: The parameters.
        place_of: Where each parameter belongs; at stage 3 a unit's parameters of one kind are one chunk.
        records: The parameters' records, before they are cut.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        ranks: Number of ranks that each share has.
        options: The size of a chunk; one of parameters that stay whole is larger, if there are few large ones for the
            ranks.
        tensor: Number of ranks that have parts of what is assembled; all of them make the same plan for it.
    """
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for member in reversed(members):
        parameter = member.parameter
        trained = member.group >= 0 or parameter.requires_grad
        copies = frozenset(rank for box in records[parameter].boxes for rank in box.copies)
        stepped = (trained, member.owner, member.atomic, member.assembled, member.kept)
        where = (member.share, place_of[parameter], parameter.dtype, parameter.device)
        kind = (*where, *stepped, None if member.assembled else copies)
        kinds.setdefault(kind, []).append(member)

    def numel(member: Member) -> int:
        return -(-records[member.parameter].numel // tensor) if member.assembled else member.shape.numel()

    def item(member: Member) -> PackedItem:
        weight = records[member.parameter].numel if member.assembled else 0
        return PackedItem(numel=member.shape.numel(), group=member.group, weight=weight)

    def wastes(part: Sequence[Member]) -> bool:
        """Whether whole parameters are dealt out to the ranks so unevenly that a quarter of the chunk is padding."""
        if not part[0].atomic:
            return False
        items = [PackedItem(numel=records[member.parameter].numel, group=0) for member in part]
        layout = pack_atomic(items, ranks[part[0].share])
        return layout.padding > layout.size / 4

    parts = [
        part[::-1]
        for kind in kinds.values()
        for part in (
            [kind]
            if stage.shards_parameters
            else _buckets(kind, options.overlap.bucket_of(ranks[kind[0].share]), numel, wastes)
        )
    ]
    plans = []
    # Elements of each rank so far. What is assembled counts by itself, as tensor ranks deal it out alike.
    dealt = {(share, each): [0] * count for share, count in enumerate(ranks) for each in (False, True)}
    for part in parts:
        items = [item(member) for member in part]
        among, kind_of_deal = ranks[part[0].share], (part[0].share, part[0].assembled)
        layout = pack(items, among)
        if part[0].atomic:
            before = dealt[kind_of_deal]
            layout = pack_atomic(items, among, before)
            dealt[kind_of_deal] = [own + more for own, more in zip(before, layout.loads(items), strict=True)]
        place = place_of[part[0].parameter]
        plans.append(
            ChunkPlan(members=tuple(part), place=place, layout=layout, most=layout.size, most_kept=layout.shard)
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
    """Neighbours together, until they have that many bytes, and more where a chunk of them would waste memory.

    Args:
        members: The parameters.
        limit: Number of bytes.
        numel: Gives the number of a parameter's elements.
        wastes: Says whether a chunk of some parameters would be padded for the most part.
    """
    buckets: list[list[Member]] = [[]]
    size = 0
    for member in members:
        if size >= limit and not wastes(buckets[-1]):
            buckets.append([])
            size = 0
        buckets[-1].append(member)
        size += numel(member) * member.parameter.element_size()
    if len(buckets) > 1 and wastes(buckets[-1]):
        buckets[-2:] = [[*buckets[-2], *buckets[-1]]]
    return buckets


def pack_chunk_(
    plan: ChunkPlan,
    groups: Groups,
    stage: ZeroStage,
    options: ShardOptions,
    device: torch.device | None,
    make_alike: Callable[[torch.Tensor], None],
) -> Chunk:
    """Makes a chunk. Its parameters come to lie in it, and the memory that they had is given back.

    Parameters on the meta device become real, with nothing but zeros in them. On the way there is memory for one whole
    chunk beside that of its parameters.

    Args:
        plan: What goes into the chunk.
        groups: The ranks that share it.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        options: Dtypes.
        device: Where the chunk lies. None: where its parameters are.
        make_alike: Gives the values of the whole buffer, of which each rank has its own, the first rank's.
    """
    first = plan.members[0].parameter
    abstract = first.is_meta
    packed = torch.zeros(plan.layout.size, dtype=first.dtype, device=device or first.device)
    with torch.no_grad():
        for member, (start, stop) in zip(plan.members, plan.layout.slots, strict=True):
            view = packed[start:stop].view(member.shape)
            if abstract:
                make_real_(member.parameter, view)
            else:
                view.copy_(member.parameter)
                member.parameter.data = view  # so that its own memory is given back before there is more
    if not abstract:
        make_alike(packed)
    dtype, real = plan.dtype_in_use(options), first.is_floating_point()
    return Chunk(
        plan.members,
        plan.layout,
        groups,
        stage=stage,
        packed=packed,
        dtype=dtype,
        reduce_dtype=options.precision.reduce_dtype if options.precision.reduce_dtype is not None and real else dtype,
        items=plan.place.items,
    )
