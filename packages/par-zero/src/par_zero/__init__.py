"""ZeRO stages 0 to 3 from one design: data parallelism without duplicates."""

from ._budget import PredictedStep, predict_step
from ._cost import Memory, memory, traffic
from ._policies import MixedPrecision, OptimizerUpdate, Overlap, ParameterInit, ShardOptions, bucket_bytes
from ._shard import shard, sync_module_states_
from ._sharded import disk_usage, no_sync, program, reduces_gradients, reload_state, reset, residency, summon, trace
from ._tiers import Offload
from .layout.sharers import DataParallelGroup
from .offload.tier import DiskUsage
from .optimizer.model_parallel import check_partial_sums, check_update_scope, needs_full_tensors, shard_state_
from .placement.ledger import Ledger, Placement, simulate
from .placement.moments import Moment, Trace
from .placement.place import place
from .placement.policies import register_policy
from .programs.draw import draw_program
from .programs.ledger import ChunkBytes, ZeroProgram
from .residency.table import Residency

__version__ = "0.1.0"

__all__ = [
    "ChunkBytes",
    "DataParallelGroup",
    "DiskUsage",
    "Ledger",
    "Memory",
    "MixedPrecision",
    "Moment",
    "Offload",
    "OptimizerUpdate",
    "Overlap",
    "ParameterInit",
    "Placement",
    "PredictedStep",
    "Residency",
    "ShardOptions",
    "Trace",
    "ZeroProgram",
    "bucket_bytes",
    "check_partial_sums",
    "check_update_scope",
    "disk_usage",
    "draw_program",
    "memory",
    "needs_full_tensors",
    "no_sync",
    "place",
    "predict_step",
    "program",
    "reduces_gradients",
    "register_policy",
    "reload_state",
    "reset",
    "residency",
    "shard",
    "shard_state_",
    "simulate",
    "summon",
    "sync_module_states_",
    "trace",
    "traffic",
]
