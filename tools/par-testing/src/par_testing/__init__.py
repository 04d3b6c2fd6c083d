"""Multi-rank tests in milliseconds: a pytest plugin, and what such tests need beside it.

The plugin itself is `par_testing._plugin`, which pytest loads by its entry point; every run of pytest therefore imports
this file, so the public names are imported when they are first used: most of them need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._faults import Fault, InjectedFault, fail_at
    from ._for_each import for_each, storm
    from ._fp64 import keep_fp64
    from ._limited import limited_backend
    from ._observe import observe_results, wait_until
    from ._once import once
    from .accelerator.by_default import default_device_type
    from .accelerator.errors import HostAccessError, RaceError, StrictDeviceError
    from .accelerator.options import Accelerator, Costs, accelerator_type
    from .accelerator.times import (
        device_times,
        host_moment,
        host_works,
        own_host_time,
        pageable_seen,
        races_seen,
        wait_until_moment,
        waits_seen,
    )
    from .counting.counting import Collective, Counted, count_collectives
    from .counting.memory import live_bytes, live_storages, peak_bytes, saved_bytes
    from .counting.modules import modules_called
    from .counting.parity import assert_equal_to_one_device
    from .counting.volume import received_per_rank
    from .ranks.outside import on_strict_ranks
    from .strict.clock import Times
    from .strict.operation import label
    from .strict.options import Compute, Links, Strict
    from .strict.player import StrictError, strict_time
    from .strict.step import FirstUseError, HostWaitError, no_first_use, step
    from .strict.streams import virtual_streams

__all__ = [
    "Accelerator",
    "Collective",
    "Compute",
    "Costs",
    "Counted",
    "Fault",
    "FirstUseError",
    "HostAccessError",
    "HostWaitError",
    "InjectedFault",
    "Links",
    "RaceError",
    "Strict",
    "StrictDeviceError",
    "StrictError",
    "Times",
    "accelerator_type",
    "assert_equal_to_one_device",
    "count_collectives",
    "default_device_type",
    "device_times",
    "fail_at",
    "for_each",
    "host_moment",
    "host_works",
    "keep_fp64",
    "label",
    "limited_backend",
    "live_bytes",
    "live_storages",
    "modules_called",
    "no_first_use",
    "observe_results",
    "on_strict_ranks",
    "once",
    "own_host_time",
    "pageable_seen",
    "peak_bytes",
    "races_seen",
    "received_per_rank",
    "saved_bytes",
    "step",
    "storm",
    "strict_time",
    "virtual_streams",
    "wait_until",
    "wait_until_moment",
    "waits_seen",
]

_LATE = {
    "accelerator.by_default": ("default_device_type",),
    "accelerator.errors": ("HostAccessError", "RaceError", "StrictDeviceError"),
    "accelerator.options": ("Accelerator", "Costs", "accelerator_type"),
    "accelerator.times": (
        "device_times",
        "host_moment",
        "host_works",
        "own_host_time",
        "pageable_seen",
        "races_seen",
        "wait_until_moment",
        "waits_seen",
    ),
    "counting.counting": ("Collective", "Counted", "count_collectives"),
    "_faults": ("Fault", "InjectedFault", "fail_at"),
    "_for_each": ("for_each", "storm"),
    "_fp64": ("keep_fp64",),
    "_limited": ("limited_backend",),
    "_observe": ("observe_results", "wait_until"),
    "_once": ("once",),
    "counting.memory": ("live_bytes", "live_storages", "peak_bytes", "saved_bytes"),
    "counting.modules": ("modules_called",),
    "counting.parity": ("assert_equal_to_one_device",),
    "counting.volume": ("received_per_rank",),
    "ranks.outside": ("on_strict_ranks",),
    "strict.operation": ("label",),
    "strict.clock": ("Times",),
    "strict.options": ("Compute", "Links", "Strict"),
    "strict.player": ("StrictError", "strict_time"),
    "strict.step": ("FirstUseError", "HostWaitError", "no_first_use", "step"),
    "strict.streams": ("virtual_streams",),
}


def __getattr__(name: str) -> object:
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
