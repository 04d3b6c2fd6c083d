"""Lanes: the numbers of parts into which every topology divides a step, so that its bits are the same on each."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

from .axes import axis_size, data_axes
from .topology import Topology


@dataclass(frozen=True, kw_only=True)
class LaneCounts:
    """Numbers of parts of each kind of sum in a training step.

    Ranks divide the parts, never the arithmetic inside a part. Each part is thus computed in the same shapes on every
    topology, and only sums of parts remain.

    Args:
        data: Number of microbatches of a step, over all data ranks.
        tensor: Number of blocks of each sharded weight, over all tensor ranks; 1 for weights that no rank shards.
        sequence: Number of chunks of each sequence, over all ranks that split it; 1 for sequences that no rank splits.

    Raises:
        ValueError: A number is not a positive integer.
    """

    data: int
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            number = getattr(self, each.name)
            if type(number) is not int or number < 1:
                raise ValueError(f"lanes: {each.name}={number!r} must be a positive integer, such as 8")

    @property
    def in_layers(self) -> bool:
        """Whether layers compute in several parts, not only batches."""
        return self.tensor > 1 or self.sequence > 1

    def check(self, topology: Topology) -> None:
        """Check that the ranks of a topology divide the lanes.

        Args:
            topology: A topology of `Topology.from_config`, or another one with an axis "data".

        Raises:
            ValueError: A number of ranks does not divide its lanes, a tensor or sequence rank has lanes that are no
                subtree of all lanes, or the mode of the axis "tensor" is not "1d" or of "sequence" is not "gather".
        """
        tensor_mode = topology.modes.get("tensor", (None, {}))[0]
        if tensor_mode not in (None, "1d") and axis_size(topology, "tensor") > 1:
            raise ValueError(
                f"tensor mode {tensor_mode!r} with lanes: it divides sums in an order that no other topology has; use "
                f"tensor=dict(size={axis_size(topology, 'tensor')}, mode='1d')"
            )
        replicas = topology.size(data_axes(topology))
        if self.data % replicas:
            raise ValueError(
                f"lanes={self.data}: they do not divide among {replicas} data ranks; pass a multiple of {replicas}"
            )
        for name, lanes in (("tensor", self.tensor), ("sequence", self.sequence)):
            ranks = axis_size(topology, name)
            each, rest = divmod(lanes, ranks)
            # Sums over these lanes form a binary tree. A rank can compute its part of the tree only if its lanes are
            # the leaves of one subtree. Losses over sequence ranks are multiplied by the number of ranks, which is
            # exact only for powers of two.
            is_tree = each & (each - 1) == 0 and (name == "tensor" or ranks & (ranks - 1) == 0)
            if rest or (ranks > 1 and not is_tree):
                raise ValueError(
                    f"lanes: {name}={lanes} must be a power of two times the {ranks} {name} ranks; pass "
                    f"lanes=dict(data={self.data}, {name}={ranks}), or a larger one, to all runs that you compare"
                )
        mode, options = topology.modes.get("sequence", ("gather", {}))
        if mode != "gather" or options.get("split", "auto") not in ("auto", "contiguous"):
            raise ValueError(
                f"sequence mode {mode!r} {dict(options)} with lanes: ranks have contiguous lanes, and gather all keys, "
                "since every other mode adds in an order that no other topology has; use "
                f"sequence=dict(size={topology.size('sequence')}, mode='gather')"
            )


class Addable(Protocol):
    """A number or a tensor."""

    def __add__(self, other: Self, /) -> Self:
        """Return the sum."""
        ...


A = TypeVar("A", bound=Addable)


def tree(parts: Sequence[A]) -> A:
    """Add parts in a fixed binary tree: neighbours first, then neighbouring sums.

    Ranks that each hold adjacent leaves of one subtree add them first, and then add their sums by the same function.
    The result then has the same bits as on one rank.

    Args:
        parts: Numbers or tensors, one or more.
    """
    sums = list(parts)
    while len(sums) > 1:
        pairs = [first + second for first, second in zip(sums[::2], sums[1::2], strict=False)]
        sums = pairs if len(sums) % 2 == 0 else [*pairs, sums[-1]]
    return sums[0]
