"""ZeRO stages 0 to 3 from one design: data parallelism without duplicates."""

from ._cost import Memory, Transfers, bucket_bytes, memory, traffic, transfers
from ._options import ShardOptions
from ._shard import make_alike_, no_sync, on_disk, recall, reset, residency, shard, summon, trace
from ._tiers import Offload
from .known.classes import Scope
from .known.scope import scope_of
from .layout.buffers import elements_lent
from .layout.sharers import Share
from .layout.sizes import ChunkSize, chunk_sizes
from .offload.stream import OnDisk
from .optimizer.probe import contradiction, count_bytes_of_steps, slots_of_steps
from .placement.ledger import Ledger, Placement, simulate
from .placement.moments import Moment, Trace
from .placement.place import place
from .placement.policies import register_policy
from .residency.table import Residency

__version__ = "0.1.0"

__all__ = [
    "ChunkSize",
    "Ledger",
    "Memory",
    "Moment",
    "Offload",
    "OnDisk",
    "Placement",
    "Residency",
    "Scope",
    "ShardOptions",
    "Share",
    "Trace",
    "Transfers",
    "bucket_bytes",
    "chunk_sizes",
    "contradiction",
    "count_bytes_of_steps",
    "elements_lent",
    "make_alike_",
    "memory",
    "no_sync",
    "on_disk",
    "place",
    "recall",
    "register_policy",
    "reset",
    "residency",
    "scope_of",
    "shard",
    "simulate",
    "slots_of_steps",
    "summon",
    "trace",
    "traffic",
    "transfers",
]
