"""What is known of parameters, of a chunk and of a module before chunks have memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from .._param_groups import ParamGroup
from .._policies import MixedPrecision, ShardOptions
from .._stage import ZeroStage
from .packing import ChunkLayout, SliceRange
from .sharers import PlannedRanks
from .units import RegisteredUnit, UnitPlace, tensors_of


@dataclass(eq=False, kw_only=True)
class Member:
    """Parameter of a chunk.

    Args:
        parameter: Parameter of the module.
        names: All names of the parameter in the module. A tied parameter has several.
        group: Number of its param group among those of all optimizers; -1 if no optimizer has it.
        owner: Number of its optimizer; -1 if no optimizer has it.
        atomic: Whether its optimizer needs the full tensor.
        assembled: Whether the full tensor is assembled from the shards of tensor-parallel ranks or from several boxes.
        share: Index of its data-parallel group: 0 for `group` of `shard`, then `expert_groups`.
        place: FSDP unit, and the called modules that have it.
        shape: Shape of the parameter on this rank before `shard` shards it.
        kept: Whether the module computes with it in its own dtype, regardless of `param_dtype`.
    """

    parameter: nn.Parameter
    names: tuple[str, ...]
    group: int
    owner: int = -1
    atomic: bool = False
    assembled: bool = False
    share: int = 0
    place: UnitPlace
    shape: torch.Size
    kept: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPlan:
    """Chunk that has no memory yet.

    Args:
        members: Parameters, which still have memory of their own.
        layout: Positions of the parameters in the chunk.
        precision: Dtypes that the caller of `shard` wants.
        most: Number of elements of the chunk on the rank with the largest. Ranks may hold different numbers of experts,
            so decisions that must be equal on all ranks use this number.
        most_kept: Number of elements of the largest shard that any rank keeps at stage 3.
    """

    members: tuple[Member, ...]
    layout: ChunkLayout
    precision: MixedPrecision
    most: int
    most_kept: int

    @cached_property
    def name(self) -> str:
        """Name of its first parameter, which programs use as the name of the chunk."""
        return self.members[0].names[0]

    @cached_property
    def place(self) -> UnitPlace:
        """FSDP unit of all parameters, and the called modules that have them."""
        return self.members[0].place

    @cached_property
    def share(self) -> int:
        """Index of the data-parallel group of all parameters."""
        return self.members[0].share

    @cached_property
    def owner(self) -> int:
        """Number of the optimizer that has all parameters; -1 if no optimizer has them."""
        return self.members[0].owner

    @property
    def trained(self) -> bool:
        """Whether the parameters get gradients."""
        return self.owner >= 0 or self.members[0].parameter.requires_grad

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype in which the optimizer steps the parameters."""
        return self.members[0].parameter.dtype

    @cached_property
    def kept(self) -> bool:
        """Whether the module computes with the parameters in their own dtype, regardless of `param_dtype`."""
        return self.members[0].kept

    @cached_property
    def assembled(self) -> bool:
        """Whether the optimizer steps assembled tensors in place of slices: see `par_zero.optimizer.assembly`."""
        return self.members[0].assembled

    @cached_property
    def arriving(self) -> int:
        """Bytes of the gradients of the parameters as autograd makes them."""
        return sum(member.shape.numel() for member in self.members) * self.dtype_in_use.itemsize

    @cached_property
    def dtype_in_use(self) -> torch.dtype:
        """Dtype in which the module uses the parameters. Complex parameters keep their own dtype."""
        wanted = self.precision.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point and not self.kept else self.dtype

    @cached_property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed. Complex gradients keep their own dtype."""
        wanted = self.precision.reduce_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype_in_use

    def updated(self, rank: int, stage: ZeroStage) -> tuple[int, int]:
        """Return the first element that the optimizer of a rank updates, and the last plus one.

        Args:
            rank: Index of the rank in the data-parallel group.
            stage: ZeRO stage.
        """
        return self.layout.share(rank) if stage.shards_state else (0, self.layout.size)


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A module as `shard` will pack it, and all else that decides its bytes.

    Args:
        chunks: The chunks, in backward order.
        units: Units at stage 3, by number; empty below stage 3.
        groups: Param groups of all optimizers.
        stage: ZeRO stage.
        options: Options of `shard`.
        ranks: Ranks of each data-parallel group.
        unpacked: Bytes of the module's parameters and buffers that no chunk contains.
        is_on_cpu: Whether the module computes on a CPU, whose memory is the host's. Default: True.
        assembled: Number of elements that this rank steps of each assembled parameter. Default: the ranks have not
            agreed on it yet.
    """

    chunks: Sequence[ChunkPlan]
    units: Sequence[RegisteredUnit]
    groups: Sequence[ParamGroup]
    stage: ZeroStage
    options: ShardOptions
    ranks: Sequence[PlannedRanks]
    unpacked: int
    is_on_cpu: bool = True
    assembled: Mapping[nn.Parameter, int] = field(default_factory=dict)

    @cached_property
    def stepped(self) -> list[ChunkPlan]:
        """Chunks that an optimizer has, in backward order."""
        return [plan for plan in self.chunks if plan.owner >= 0]

    def stepped_elements(self, plan: ChunkPlan, slices: Iterable[SliceRange]) -> int:
        """Return the number of elements that a rank's optimizer steps of a chunk.

        Args:
            plan: Chunk.
            slices: Slices of the chunk that the rank updates. Before the ranks have agreed, the rank counts as stepping
                as many elements of assembled tensors as it holds.
        """
        if not plan.assembled or not self.assembled:
            return sum(part.stop - part.start for part in slices)
        own, index = plan.layout.owners, self.ranks[plan.share].index
        members = [
            each for each, owner in zip(plan.members, own, strict=True) if owner == index or not self.stage.shards_state
        ]
        return sum(self.assembled.get(member.parameter, 0) for member in members)


def unpacked_bytes(module: nn.Module, plans: Sequence[ChunkPlan]) -> int:
    """Return the bytes of a module's parameters and buffers that no chunk contains."""
    own = {id(tensor): tensor.nbytes for _, tensor in tensors_of(module)}
    return sum(own.values()) - sum(own[id(member.parameter)] for plan in plans for member in plan.members)
