"""Data that each ZeRO stage shards. Code reads the property that it needs instead of comparing numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ZeroStage:
    """ZeRO stage: the kinds of data of which a rank keeps only its shard, instead of a replica.

    Args:
        shards_state: Whether the optimizer updates only this rank's shard, and has state for no more.
        shards_gradients: Whether a rank keeps only its shard of reduced gradients.
        shards_parameters: Whether a rank keeps only its shard of parameters while no module uses them.
    """

    shards_state: bool
    shards_gradients: bool
    shards_parameters: bool


STAGES = (
    ZeroStage(shards_state=False, shards_gradients=False, shards_parameters=False),  # as DistributedDataParallel
    ZeroStage(shards_state=True, shards_gradients=False, shards_parameters=False),
    ZeroStage(shards_state=True, shards_gradients=True, shards_parameters=False),
    ZeroStage(shards_state=True, shards_gradients=True, shards_parameters=True),
)
"""Stages, by the number that is passed to `shard`."""
