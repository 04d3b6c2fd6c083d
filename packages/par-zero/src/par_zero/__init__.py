"""ZeRO stages 0 to 3 from one design: data parallelism without duplicates."""

from ._cost import Memory, Transfers, bucket_bytes, memory, traffic, transfers
from ._options import ShardOptions
from ._shard import no_sync, on_disk, recall, reset, residency, shard, summon, trace
from ._tiers import Offload
from .layout.sharers import Share
from .offload.stream import OnDisk
from .optimizer.probe import looks_at_all_tensors, looks_at_whole_tensors, slots_of_steps
from .placement.ledger import Ledger, Placement, simulate
from .placement.moments import Moment, Trace
from .placement.place import place
from .placement.policies import register_policy
from .residency.table import Residency

__version__ = "0.1.0"

__all__ = [
    "Ledger",
    "Memory",
    "Moment",
    "Offload",
    "OnDisk",
    "Placement",
    "Residency",
    "ShardOptions",
    "Share",
    "Trace",
    "Transfers",
    "bucket_bytes",
    "looks_at_all_tensors",
    "looks_at_whole_tensors",
    "memory",
    "no_sync",
    "on_disk",
    "place",
    "recall",
    "register_policy",
    "reset",
    "residency",
    "shard",
    "simulate",
    "slots_of_steps",
    "summon",
    "trace",
    "traffic",
    "transfers",
]
