"""Who shares a chunk: the ranks that each keep a part of it, and those that keep the same part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Sharding, backend_of


@dataclass(frozen=True, eq=False)
class DataParallelGroup:
    """Ranks that read different data, hold replicas of the same parameters, and shard the work on these.

    Args:
        group: The ranks.
        replicas: Ranks that hold the same shard as this rank, for hybrid sharding. None: each shard exists once.
        divisor: Divisor of a sum of gradients, if `shard` averages gradients. None: the divisor of all other gradients,
            which is the number of ranks over which the loss is a mean. That is right for experts: they receive the
            tokens of all these ranks, even if few ranks hold a replica.
        parameters: Parameters that these ranks shard. None: the parameters of which all of these ranks hold a replica
            by their sharding metadata, and not all ranks of `shard(group=...)` do. You must name the parameters if
            these ranks include all ranks of `shard(group=...)` and more, such as for experts whose replicas on
            tensor-parallel ranks receive different tokens: all parameters that these ranks replicate look the same.
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
        """The group, and the replicas if there are any."""
        return [self.group] if self.replicas is None else [self.group, self.replicas]

    @property
    def replica_ranks(self) -> list[int]:
        """Global ranks that hold the same shard as this rank, this rank too."""
        return [dist.get_rank()] if self.replicas is None else dist.get_process_group_ranks(self.replicas)

    @property
    def near(self) -> list[int]:
        """The ranks of the group and the replicas of this rank, by number of the world, ascending."""
        return sorted({rank for group in self.groups for rank in dist.get_process_group_ranks(group)})

    def has_copies(self, record: Sharding) -> bool:
        """Whether all of these ranks have copies of all that this rank has of a parameter."""
        return all(set(self.near) <= set(box.copies) for box in record.boxes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Who shares a chunk, by communicators.

    Args:
        shards: The ranks that each keep a share.
        gathers: The same ranks by the communicator over which parameters are gathered at stage 3, where data decides on
            each rank what comes first, a gathering or a reduction; before stage 3 `shards`.
        replicas: The ranks that keep the same share, for hybrid sharding; None without.
        divisor: By what the sum of gradients over all of them is divided. None: by nothing.
    """

    shards: dist.ProcessGroup
    gathers: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    divisor: int | None

    @property
    def rank(self) -> int:
        """Which share is this rank's."""
        return dist.get_rank(self.shards)

    @property
    def both(self) -> list[dist.ProcessGroup]:
        """The communicators on which reductions go."""
        return [self.shards] if self.replicas is None else [self.shards, self.replicas]

    @property
    def scale(self) -> float:
        """By what numbers are multiplied as they are summed over `shards`."""
        if self.divisor is None:
            return 1
        return (1 if self.replicas is None else dist.get_world_size(self.replicas)) / self.divisor

    @property
    def scale_of_replicas(self) -> float:
        """By what that sum is multiplied as it is summed over `replicas`."""
        return 1 if self.divisor is None or self.replicas is None else 1 / dist.get_world_size(self.replicas)

    @property
    def is_pair(self) -> bool:
        """Whether there are two ranks in all: a sum of two is the same in either order, so any all-reduce will do."""
        return self.replicas is None and dist.get_world_size(self.shards) == 2


@dataclass(frozen=True, kw_only=True)
class Sharers:
    """All who share the chunks of a module, which follow one order.

    Args:
        each: Those of each share, the first one's first.
        reach: Of each, whether it has ranks that the first group of some rank has not. The first one counts as such.
    """

    each: tuple[Groups, ...]
    reach: tuple[bool, ...]

    @property
    def agreeing(self) -> list[dist.ProcessGroup]:
        """The communicators over which one after the other all ranks tell each other what they must know alike."""
        return [
            group for groups, reaches in zip(self.each, self.reach, strict=True) if reaches for group in groups.both
        ]

    @property
    def gathering(self) -> list[dist.ProcessGroup]:
        """The same for those that gather units together, by the communicators of that."""
        return [groups.gathers for groups, reaches in zip(self.each, self.reach, strict=True) if reaches]

    @property
    def beside_replicas(self) -> list[dist.ProcessGroup]:
        """Of `agreeing` those whose ranks run forward together, as they gather the same units."""
        return [groups.shards for groups, reaches in zip(self.each, self.reach, strict=True) if reaches]

    @property
    def beside_gathering(self) -> list[dist.ProcessGroup]:
        """Of `agreeing` those that `gathering` does not come to."""
        shards = [groups.shards for groups in self.each]
        return [group for group in self.agreeing if not any(group is each for each in shards)]

    def device_of_flags(self, device: torch.device) -> torch.device:
        """The device of what the host wants to know: the CPU, unless a group is of NCCL alone; then the chunks'."""
        return torch.device("cpu") if all(backend_of(group, "cpu") for group in self.agreeing) else device
