"""ZeRO stages 0 to 3 from one design: data parallelism without duplicates."""

from ._cost import Memory, Transfers, bucket_bytes, memory, traffic, transfers
from ._options import ShardOptions
from ._shard import no_sync, reset, shard, summon
from ._tiers import Offload
from .optimizer.probe import looks_at_all_tensors, looks_at_whole_tensors

__version__ = "0.1.0"

__all__ = [
    "Memory",
    "Offload",
    "ShardOptions",
    "Transfers",
    "bucket_bytes",
    "looks_at_all_tensors",
    "looks_at_whole_tensors",
    "memory",
    "no_sync",
    "reset",
    "shard",
    "summon",
    "traffic",
    "transfers",
]
