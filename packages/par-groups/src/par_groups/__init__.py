"""Groups of ranks that work together, and shardings of tensors over them.

The arithmetic (`Topology`, `Box`, `Sharding`, modes, registries) is imported at once and needs no torch. All names that
need torch are imported on first use. A plan for 100,000 ranks therefore takes a small, quick process.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._disk import sync_to_disk
from ._error_text import error_text
from ._registry import Registry
from ._sizes import format_bytes, format_seconds, parse_size
from ._slotted import slotted_attributes
from ._wrappers import original_name
from .live.environment import Launch, read_environment
from .live.signals import STOP_SIGNALS, block_stop_signals, watch_parent
from .sharding.sharding import Box, Sharding, cut, part_of, set_sharding, whole
from .topology.axes import averaged_axes, axis_size, data_axes, replica_axes, splits_sequence
from .topology.channels import Channels
from .topology.experts import EXPERTS
from .topology.lanes import LaneCounts, tree
from .topology.modes import Split, register_mode
from .topology.topology import Axes, Topology

if TYPE_CHECKING:
    from ._bytes import bytes_of
    from ._torch_private import default_store, is_called_by_state_dict_of_dcp, is_compiled, timeout_of
    from .elastic.keeper import keep
    from .elastic.members import Members
    from .live.agreement import agree, check_alike, together
    from .live.among import group_among
    from .live.backends import Collective, accelerator_of, backend_of, check_collectives, sendable
    from .live.calls import CallWatch
    from .live.copies import HostCopies, HostCopy, copy_to_device, copy_to_host, number_on_device
    from .live.launch import Environment, launch
    from .live.logging import RankLogger, get_logger
    from .live.process_groups import ProcessGroups
    from .live.recorder import FlightRecorder
    from .live.trace import (
        Communicator,
        Operation,
        call_sites,
        is_library_path,
        read_flight_trace,
        shorten_path,
    )
    from .live.versions import DISTRIBUTIONS
    from .live.vote import Vote
    from .optimizers.classes import UpdateScope
    from .optimizers.clone import TensorStepper
    from .optimizers.scope import update_scope_of
    from .optimizers.trial import (
        draws_numbers,
        find_scope_violation,
        is_per_element,
        state_counter_bytes,
        state_slots,
    )
    from .sharding.digest import Digest, digest_of
    from .sharding.dtensor import to_dtensor
    from .sharding.gradient_elsewhere import METADATA_OPERATIONS, GradientElsewhere, stand_in_gradient
    from .sharding.gradients import (
        follow_written_,
        gradients,
        on_settle,
        on_written,
        refuse_get_state_dict,
        set_gradient_elsewhere,
        settle_,
        written_,
    )
    from .sharding.held import Boxes, Claims, GlobalTensor, Rectangle, intersect_rectangles, subtract_rectangle
    from .sharding.joint import JointOptimizer
    from .sharding.kept_dtype import keep_packed_weights_, kept_tensors, packed_scales, packed_weights
    from .sharding.merging import merge_claims
    from .sharding.on_grid import EXACT_LIMIT, exact_sum, on_grid
    from .sharding.optimizers import drop_reads_, has_stepped, zero_grad_
    from .sharding.ownership import check_owned
    from .sharding.segments import (
        SCALARS,
        Segment,
        Segments,
        segments_of,
        set_segments,
        set_slots,
        sharding_of,
        slots_of,
    )
    from .sharding.watched_weight import WatchedParameter, WatchedWeight, watch_weight_
    from .sharding.weight_gradients import WeightGradHook, WeightGradient, add_product, weight_and_hook

__version__ = "0.1.0"

__all__ = [
    "DISTRIBUTIONS",
    "EXACT_LIMIT",
    "EXPERTS",
    "METADATA_OPERATIONS",
    "SCALARS",
    "STOP_SIGNALS",
    "Axes",
    "Box",
    "Boxes",
    "CallWatch",
    "Channels",
    "Claims",
    "Collective",
    "Communicator",
    "Digest",
    "Environment",
    "FlightRecorder",
    "GlobalTensor",
    "GradientElsewhere",
    "HostCopies",
    "HostCopy",
    "JointOptimizer",
    "LaneCounts",
    "Launch",
    "Members",
    "Operation",
    "ProcessGroups",
    "RankLogger",
    "Rectangle",
    "Registry",
    "Segment",
    "Segments",
    "Sharding",
    "Split",
    "TensorStepper",
    "Topology",
    "UpdateScope",
    "Vote",
    "WatchedParameter",
    "WatchedWeight",
    "WeightGradHook",
    "WeightGradient",
    "accelerator_of",
    "add_product",
    "agree",
    "averaged_axes",
    "axis_size",
    "backend_of",
    "block_stop_signals",
    "bytes_of",
    "call_sites",
    "check_alike",
    "check_collectives",
    "check_owned",
    "copy_to_device",
    "copy_to_host",
    "cut",
    "data_axes",
    "default_store",
    "digest_of",
    "draws_numbers",
    "drop_reads_",
    "error_text",
    "exact_sum",
    "find_scope_violation",
    "follow_written_",
    "format_bytes",
    "format_seconds",
    "get_logger",
    "gradients",
    "group_among",
    "has_stepped",
    "intersect_rectangles",
    "is_called_by_state_dict_of_dcp",
    "is_compiled",
    "is_library_path",
    "is_per_element",
    "keep",
    "keep_packed_weights_",
    "kept_tensors",
    "launch",
    "merge_claims",
    "number_on_device",
    "on_grid",
    "on_settle",
    "on_written",
    "original_name",
    "packed_scales",
    "packed_weights",
    "parse_size",
    "part_of",
    "read_environment",
    "read_flight_trace",
    "refuse_get_state_dict",
    "register_mode",
    "replica_axes",
    "segments_of",
    "sendable",
    "set_gradient_elsewhere",
    "set_segments",
    "set_sharding",
    "set_slots",
    "settle_",
    "sharding_of",
    "shorten_path",
    "slots_of",
    "slotted_attributes",
    "splits_sequence",
    "stand_in_gradient",
    "state_counter_bytes",
    "state_slots",
    "subtract_rectangle",
    "sync_to_disk",
    "timeout_of",
    "to_dtensor",
    "together",
    "tree",
    "update_scope_of",
    "watch_parent",
    "watch_weight_",
    "weight_and_hook",
    "whole",
    "written_",
    "zero_grad_",
]

_MODULE_OF = {
    name: module
    for module, names in {
        "elastic.keeper": ("keep",),
        "elastic.members": ("Members",),
        "live.agreement": ("agree", "check_alike", "together"),
        "live.among": ("group_among",),
        "live.backends": ("Collective", "accelerator_of", "backend_of", "check_collectives", "sendable"),
        "live.calls": ("CallWatch",),
        "live.copies": ("HostCopies", "HostCopy", "copy_to_device", "copy_to_host", "number_on_device"),
        "live.launch": ("Environment", "launch"),
        "live.logging": ("RankLogger", "get_logger"),
        "live.process_groups": ("ProcessGroups",),
        "live.recorder": ("FlightRecorder",),
        "_bytes": ("bytes_of",),
        "_torch_private": ("default_store", "is_called_by_state_dict_of_dcp", "is_compiled", "timeout_of"),
        "live.trace": (
            *("Communicator", "Operation", "call_sites", "is_library_path"),
            *("read_flight_trace", "shorten_path"),
        ),
        "live.versions": ("DISTRIBUTIONS",),
        "live.vote": ("Vote",),
        "optimizers.classes": ("UpdateScope",),
        "optimizers.clone": ("TensorStepper",),
        "optimizers.scope": ("update_scope_of",),
        "optimizers.trial": (
            *("draws_numbers", "find_scope_violation", "is_per_element"),
            *("state_counter_bytes", "state_slots"),
        ),
        "sharding.digest": ("Digest", "digest_of"),
        "sharding.dtensor": ("to_dtensor",),
        "sharding.gradient_elsewhere": ("METADATA_OPERATIONS", "GradientElsewhere", "stand_in_gradient"),
        "sharding.gradients": (
            *("follow_written_", "gradients", "on_settle", "on_written", "set_gradient_elsewhere"),
            *("refuse_get_state_dict", "settle_", "written_"),
        ),
        "sharding.held": (
            *("Boxes", "Claims", "GlobalTensor", "Rectangle"),
            *("intersect_rectangles", "subtract_rectangle"),
        ),
        "sharding.joint": ("JointOptimizer",),
        "sharding.kept_dtype": ("keep_packed_weights_", "kept_tensors", "packed_scales", "packed_weights"),
        "sharding.merging": ("merge_claims",),
        "sharding.on_grid": ("EXACT_LIMIT", "exact_sum", "on_grid"),
        "sharding.optimizers": ("drop_reads_", "has_stepped", "zero_grad_"),
        "sharding.ownership": ("check_owned",),
        "sharding.segments": (
            *("SCALARS", "Segment", "Segments", "segments_of", "set_segments"),
            *("set_slots", "sharding_of", "slots_of"),
        ),
        "sharding.watched_weight": ("WatchedParameter", "WatchedWeight", "watch_weight_"),
        "sharding.weight_gradients": ("WeightGradHook", "WeightGradient", "add_product", "weight_and_hook"),
    }.items()
    for name in names
}
"""The module of each public name that is imported when it is first used."""


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
