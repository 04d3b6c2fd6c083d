"""Data-parallel groups of chunks: the ranks that each hold a shard, and the ranks that hold the same shard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Sharding, backend_of

from ..watch.calls import ModuleCalls


@dataclass(frozen=True, eq=False)
class DataParallelGroup:
    """Ranks that read different data, hold replicas of the same parameters, and shard the work on these.

    Args:
        group: The ranks.
        replicas: Ranks that hold the same shard as this rank, for hybrid sharding. None: each shard exists once.
        divisor: Divisor of a sum of gradients, if `shard` averages gradients. None: the divisor of all other gradients,
            which is the number of ranks over which the loss is a mean. That is right for experts, which receive the
            tokens of all these ranks, even if few ranks hold a replica.
        parameters: Parameters that these ranks shard. None: the parameters of which all of these ranks hold a replica
            by their sharding metadata, and not all ranks of `shard(group=...)` do. You must name the parameters if
            these ranks include all ranks of `shard(group=...)` and more. The metadata then does not distinguish them
            from the other replicated parameters. Replicas of experts on tensor-parallel ranks are an example, because
            they receive different tokens.
        index_of: Function that returns the index of a global rank in its own data-parallel group, such as
            `lambda rank: topology.index("data", rank)`. It is used for parameters that are also replicated on ranks
            outside of `group` and `replicas`, such as the bias of a row-parallel layer. None: the ranks exchange their
            indices, which takes longer.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None
    divisor: int | None = None
    parameters: Sequence[nn.Parameter] | None = None
    index_of: Callable[[int], int] | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The group, followed by the group of replicas if there is one."""
        return [self.group] if self.replicas is None else [self.group, self.replicas]

    @property
    def replica_ranks(self) -> list[int]:
        """Global ranks that hold the same shard as this rank, this rank too."""
        return [dist.get_rank()] if self.replicas is None else dist.get_process_group_ranks(self.replicas)

    @property
    def near(self) -> list[int]:
        """Global ranks of the group and of this rank's replicas, in ascending order."""
        return sorted({rank for group in self.groups for rank in dist.get_process_group_ranks(group)})

    def has_copies(self, record: Sharding) -> bool:
        """Return whether all of these ranks hold replicas of everything that this rank holds of a parameter."""
        return all(set(self.near) <= set(box.copies) for box in record.boxes)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Communicators of the data-parallel group of a chunk.

    Args:
        shards: Ranks that each hold a shard.
        gathers: The same ranks on the communicator of stage 3's all-gathers. Data decides on each rank whether an
            all-gather or a reduction begins first, so one communicator for both could mix them up. Below stage 3 it
            is `shards`.
        replicas: Ranks that hold the same shard, for hybrid sharding; None: no other rank holds it.
        divisor: Divisor of the sum of gradients over all of these ranks; None: the sum is not divided.
        calls: Watch over the calls of a module, which explains errors of these communicators.
    """

    shards: dist.ProcessGroup
    gathers: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    divisor: int | None
    calls: ModuleCalls

    @property
    def rank(self) -> int:
        """Index of this rank's shard."""
        return dist.get_rank(self.shards)

    @property
    def both(self) -> list[dist.ProcessGroup]:
        """Communicators of reductions, in their order."""
        return [self.shards] if self.replicas is None else [self.shards, self.replicas]

    @property
    def scale(self) -> float:
        """Factor of gradients in the sum over `shards`."""
        if self.divisor is None:
            return 1
        # The sum over `replicas` is a mean, see `scale_of_replicas`. This factor makes up for it.
        return (1 if self.replicas is None else dist.get_world_size(self.replicas)) / self.divisor

    @property
    def scale_of_replicas(self) -> float:
        """Factor of that sum in the sum over `replicas`."""
        return 1 if self.divisor is None or self.replicas is None else 1 / dist.get_world_size(self.replicas)

    @property
    def is_pair(self) -> bool:
        """Whether the group has two ranks. A sum of two has one order, so any all-reduce gives the same bits."""
        return self.replicas is None and dist.get_world_size(self.shards) == 2


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """All data-parallel groups of a module's chunks.

    Args:
        each: Communicators of each group, first of `shard(group=...)`.
        reach: Whether each group connects ranks that the first group of some rank does not; True for the first.
    """

    each: tuple[Groups, ...]
    reach: tuple[bool, ...]

    @property
    def calls(self) -> ModuleCalls:
        """Watch over the calls of the module."""
        return self.each[0].calls

    @property
    def agreeing(self) -> list[dist.ProcessGroup]:
        """Communicators by which all ranks agree on a value, if they exchange it over one after the other."""
        return [
            group for groups, reaches in zip(self.each, self.reach, strict=True) if reaches for group in groups.both
        ]

    @property
    def gathering(self) -> list[dist.ProcessGroup]:
        """Communicators of all-gathers, for agreements between ranks that gather the same units."""
        return [groups.gathers for groups, reaches in zip(self.each, self.reach, strict=True) if reaches]

    @property
    def beside_replicas(self) -> list[dist.ProcessGroup]:
        """Communicators of `agreeing` without the replicas' ones, because replicas may be in another forward."""
        return [groups.shards for groups, reaches in zip(self.each, self.reach, strict=True) if reaches]

    @property
    def beside_gathering(self) -> list[dist.ProcessGroup]:
        """Communicators of `agreeing` whose ranks `gathering` does not connect."""
        shards = [groups.shards for groups in self.each]
        return [group for group in self.agreeing if not any(group is each for each in shards)]

    def device_of_flags(self, device: torch.device) -> torch.device:
        """Return the device for flags that the host reads: the CPU, or the chunks' if a group has only NCCL."""
        # The host reads flags in CPU memory without waiting for the device.
        return torch.device("cpu") if all(backend_of(group, "cpu") for group in self.agreeing) else device
