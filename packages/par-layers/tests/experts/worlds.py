"""Worlds with experts, and the tokens that their ranks see; what the tests of whole MoE layers share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, Topology
from par_layers import LayerSet, PartialGradientReducer, initialize, layer_set

HIDDEN, INTERMEDIATE, SEQUENCE = 8, 6, 4


@dataclass(frozen=True)
class World:
    """Groups with experts, and layers over them."""

    groups: ProcessGroups
    layers: LayerSet

    @property
    def replicas(self) -> int:
        """The number of ranks that see different tokens, N: what every mean divides by."""
        return self.groups.size(("data", "sequence", "expert"))

    @property
    def replica(self) -> int:
        """Which of them this rank is one of."""
        return self.groups.rank(("data", "sequence", "expert"))

    def average_(self, model: nn.Module) -> None:
        """Brings gradients to those of the mean over all replicas, as ZeRO or data parallelism would."""
        PartialGradientReducer(model, self.groups).handle_gradient()
        dense = ("data", "sequence", "expert")
        spread = "experts" in self.groups.topology.views
        for name, parameter in model.named_parameters():
            axes = ("data", "expert_data") if spread and name.startswith("experts.") else dense
            if self.groups.size(axes) > 1:
                dist.all_reduce(parameter.grad, group=self.groups[axes])
            parameter.grad.div_(self.replicas)


@contextmanager
def world(parallel: dict[str, Any]) -> Iterator[World]:
    """A world by a config, in which "tp" stands for tensor mode 1d and "sp" for that with sequence parallelism."""
    given = dict(parallel)
    for name in {"tp", "sp"} & given.keys():
        given["tensor"] = {"size": given.pop(name), "mode": "1d", "sequence_parallel": name == "sp"}
    topology = Topology.from_config(given, dist.get_world_size())
    with ProcessGroups(topology, declare=[("data", "sequence", "expert")]) as groups:
        yield World(groups, layer_set("auto", groups))


@dataclass(frozen=True)
class Tokens:
    """How many rows of tokens each replica has, in turn, and where they go.

    Args:
        rows: Number of rows of replica 0, 1, ...; repeated.
        favoured: Experts that all tokens go to, or none.
        experts: Number of experts; None: one for each rank that holds others, but at least top_k.
        top_k: Number of experts of a token.
    """

    rows: Sequence[int] = (2, 1, 3, 2)
    favoured: Sequence[int] = ()
    experts: int | None = 8
    top_k: int = 2

    def of(self, replica: int) -> Tensor:
        """The activation of a replica, [rows, SEQUENCE, HIDDEN]; feature 0 is 1, so that the router can favour."""
        generator = torch.Generator().manual_seed(100 + replica)
        shape = (self.rows[replica % len(self.rows)], SEQUENCE, HIDDEN)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x[..., 0] = 1.0
        return x

    def make(self, layers: LayerSet, parts: int = 1, **options: Any) -> nn.Module:
        """The layer in fp64, whose router favours what it should.

        Args:
            layers: What makes it.
            parts: Number of ranks that hold different experts, where these are to be as many.
            options: Further options of `LayerSet.MoE`.
        """
        experts = self.experts or max(parts, self.top_k)
        moe = layers.MoE(HIDDEN, INTERMEDIATE, experts, self.top_k, **options)
        initialize(moe, seed=3, dtype=torch.float64)
        with torch.no_grad():
            moe.gate.weight.mul_(3.0)  # so that gates differ
            moe.gate.weight[list(self.favoured), 0] += 60.0
        return moe


TOKENS = {
    "uneven": Tokens(),
    "one rank without tokens": Tokens(rows=(2, 0, 1, 2)),
    "all ranks but one without": Tokens(rows=(0, 3, 0, 0)),
    "all rows to one expert": Tokens(favoured=(5,), top_k=1),
    "all rows to experts of one rank": Tokens(favoured=(2, 3)),
    "as many experts as ranks": Tokens(experts=None),
    "every expert": Tokens(experts=8, top_k=8),
    "top 1": Tokens(top_k=1),
}
