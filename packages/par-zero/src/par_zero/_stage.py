"""What the stages keep twice and what they cut. Code asks for the property it needs, not for the number."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ZeroStage:
    """A stage of ZeRO: of what a rank keeps its share alone, where data parallelism keeps everything on every rank.

    Args:
        shards_state: Whether the optimizer updates this rank's share alone, and has state for no more.
        shards_gradients: Whether of reduced gradients the share alone is kept.
        shards_parameters: Whether of parameters the share alone is kept, outside of the modules that use them.
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
"""By the number that is given to `shard`."""
