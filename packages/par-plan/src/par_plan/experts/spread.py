"""Placement of experts on ranks, by the topology's view of them, and what excludes experts. No torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from par_groups import EXPERTS, Topology, axis_size

from .mixture import Load, Mixture


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Placement of experts on ranks. The default is all experts on one rank.

    Args:
        parallel: Number of ranks that the experts are distributed over.
        tensor: Number of ranks that shard each expert: 1, or all of the tensor group.
        own: Size of the axis "expert": of ranks that see other tokens, for experts' sake.
        copies: Number of ranks of a stage and replica that have the same experts.
        group: Number of tensor ranks.
        sequence: Whether these cut the sequence where layers add up.
        is_dealt: Whether the topology distributes experts, so that they have their own replicas.
    """

    parallel: int = 1
    tensor: int = 1
    own: int = 1
    copies: int = 1
    group: int = 1
    sequence: bool = False
    is_dealt: bool = False

    @property
    def reaches(self) -> bool:
        """Whether ranks that have the same experts are not all among those that have the same dense layers."""
        # Ranks with the same experts are `parallel` ranks apart. If that is a multiple of the tensor group, they have
        # the same place in their groups, and so the same shards of dense layers.
        return self.tensor < self.group and self.parallel % self.group > 0

    @property
    def label(self) -> str:
        """Text for a table: "8", "8x2" if two ranks shard each expert, or "-"."""
        if not self.is_dealt:
            return "-"
        return f"{self.parallel}x{self.tensor}" if self.tensor > 1 else str(self.parallel)


ALONE = ExpertPlacement()
"""All experts are on one rank."""


def expert_placement(topology: Topology) -> ExpertPlacement:
    """Return the placement of experts in a topology; without a view, the tensor group shards each expert."""
    group, (_, options) = topology.size("tensor"), topology.modes.get("tensor", (None, {}))
    sequence = group > 1 and bool(options.get("sequence_parallel", False))
    if EXPERTS not in topology.views:
        return ExpertPlacement(tensor=group, group=group, sequence=sequence)
    return ExpertPlacement(
        group=group,
        sequence=sequence,
        parallel=topology.size("expert_parallel"),
        tensor=topology.size("expert_tensor"),
        own=axis_size(topology, "expert"),
        copies=topology.size("expert_data"),
        is_dealt=True,
    )


def expert_config(topology: Topology) -> dict[str, Any]:
    """Return the entry for experts in a config's `parallel`; empty if experts are not distributed."""
    spread = expert_placement(topology)
    if not spread.is_dealt:
        return {}
    # The short form means what it says only if no rank of a replica holds other experts.
    if spread.own == spread.parallel and spread.tensor == topology.size("tensor"):
        return {"expert": spread.parallel}
    return {"expert": {"size": spread.parallel, "tensor": spread.tensor}}


def expert_configs(mixture: Mixture | None, tensor: int, sequence: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the placements of experts that divide, as entries of `parallel`; {} distributes nothing.

    Experts sharded over the tensor group only have the same placement as without an entry.

    Args:
        mixture: The model's experts; None: it has none.
        tensor: Number of tensor ranks.
        sequence: Number of ranks of a sequence.
        ranks: Number of ranks that are left for data and experts.
    """
    yield {}
    if mixture is None:
        return
    for parallel in range(1, mixture.experts + 1):
        for split in sorted({1, tensor}):
            # Experts first use the ranks of a replica (sequence x tensor), and then need ranks that see other data.
            own = parallel * split // math.gcd(parallel * split, sequence * tensor)
            fits = mixture.experts % parallel == 0 and mixture.intermediate % split == 0 and ranks % own == 0
            if fits and (parallel > 1 or split < tensor):
                yield {"expert": {"size": parallel, "tensor": split}}


def why_not_placed(mixture: Mixture | None, spread: ExpertPlacement, load: Load = 1.0) -> str | None:
    """Return why a placement of experts is impossible, and the fix; None if it is possible.

    Args:
        mixture: Experts of the model; None: the model has no experts.
        spread: Requested placement.
        load: Relative load of the experts. Default: 1.0.
    """
    if mixture is None:
        if not spread.is_dealt:
            return None
        return (
            f"parallel.expert deals experts out over {spread.parallel} ranks, but the model has none; leave it out, or "
            "plan a model with experts"
        )
    if mixture.experts % spread.parallel:
        return (
            f"{mixture.experts} experts do not divide by the {spread.parallel} ranks that parallel.expert deals them "
            "out over; take a number that divides them"
        )
    if spread.is_dealt and mixture.intermediate % spread.tensor:
        return (
            f"the {mixture.intermediate} features of an expert do not divide by the {spread.tensor} tensor ranks that "
            "each is cut over; give expert.tensor 1, or change one of the two"
        )
    if isinstance(load, tuple) and len(load) != mixture.experts:
        return f"imbalance has the rows of {len(load)} experts, but the model has {mixture.experts}; give one of each"
    return None


def expert_tensors(mixture: Mixture, spread: ExpertPlacement) -> tuple[int, int]:
    """Return the elements of a rank's two packed tensors of experts: input and output weights.

    Args:
        mixture: Layer of experts.
        spread: Placement of the experts on ranks.
    """
    out = mixture.experts // spread.parallel * mixture.intermediate // spread.tensor * mixture.hidden
    return (2 if mixture.gated else 1) * out, out
