"""`torch.strict`: what programs ask the module of a device, as they ask `torch.cuda`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from .options import NAME
from .state import state

_TYPE = 20  # torch's number of PrivateUse1
_CLOCK = 1.5e9  # cycles a second, for `_sleep`


def _index(device: Any = None) -> int:
    """Return the number of a device; of the current one if none is given."""
    if isinstance(device, int) and device >= 0:
        return device
    index = None if device is None or isinstance(device, int) else torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if index is None else index


class Stream(torch.Stream):
    """A stream of the device, as `torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> "Stream":
        """Make a stream, or with `stream_id` and so on one that exists."""
        if named:
            return super().__new__(cls, **named)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device, as `torch.cuda.Event`."""

    def __new__(cls, device: Any = None, enable_timing: bool = False, **_: Any) -> "Event":
        """Make an event; what CUDA knows of blocking and processes is ignored."""
        return super().__new__(cls, device=torch.device(NAME, _index(device)), enable_timing=enable_timing)


@contextmanager
def stream(given: Any) -> Iterator[None]:
    """Make a stream the current one of its device; None changes nothing."""
    if given is None:
        yield
        return
    device = torch._C._accelerator_getDeviceIndex()
    before = torch.accelerator.current_stream(given.device)
    torch.accelerator.set_stream(given)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch._C._accelerator_exchangeDevice(device)


class device:  # noqa: N801 - torch's name
    """Makes a device the current one inside of a `with`."""

    def __init__(self, index: Any) -> None:
        self._index = _index(index)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_exchangeDevice(self._before)


def _set_sync_debug_mode(mode: int | str) -> None:
    strict = mode in (2, "error")
    state.rules = replace(state.rules, waits="error" if strict else "count")


def _memory(name: str) -> Callable[..., Any]:
    """Return a function of `torch.accelerator` that takes a device as those of `torch.cuda` do."""
    function = getattr(torch.accelerator, name)
    return lambda device=None: function(_index(device))


def module(native: Any, devices: int) -> ModuleType:
    """Return the module.

    Args:
        native: Part in C++.
        devices: Number of devices.
    """
    generators = tuple(native.default_generator(number) for number in range(devices))

    def sleep(cycles: int) -> None:
        state.close(native.open("sleep"), cycles / _CLOCK, "compute")

    def set_states(states: list[torch.Tensor]) -> None:
        for generator, new in zip(generators, states, strict=True):
            generator.set_state(new)

    def initial_seed() -> int:
        return generators[_index()].initial_seed()  # type: ignore[no-any-return]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    made = ModuleType(f"torch.{NAME}")
    made.__dict__.update(
        Event=Event,
        Stream=Stream,
        _initialized=True,  # else `checkpoint` does not put the device's generator back for its recomputation
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        _sleep=sleep,
        current_device=_index,
        current_stream=lambda device=None: torch.accelerator.current_stream(torch.device(NAME, _index(device))),
        default_generators=generators,
        default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=_TYPE),
        device=device,
        device_count=lambda: devices,
        empty_cache=torch.accelerator.empty_cache,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16, torch.float32],
        get_device_capability=lambda device=None: (0, 0),  # noqa: ARG005 - torch's signature
        get_device_name=lambda device=None: "strict accelerator",  # noqa: ARG005
        get_rng_state=lambda device=None: generators[_index(device)].get_state(),
        get_rng_state_all=lambda: [generator.get_state() for generator in generators],
        get_sync_debug_mode=lambda: 2 if state.rules.waits == "error" else 0,
        init=lambda: None,
        initial_seed=initial_seed,
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed=lambda seed: generators[_index()].manual_seed(seed) and None,
        manual_seed_all=seed_all,
        max_memory_allocated=_memory("max_memory_allocated"),
        max_memory_reserved=_memory("max_memory_reserved"),
        mem_get_info=_memory("get_memory_info"),
        memory_allocated=_memory("memory_allocated"),
        memory_reserved=_memory("memory_reserved"),
        memory_stats=_memory("memory_stats"),
        reset_peak_memory_stats=_memory("reset_peak_memory_stats"),
        set_device=lambda device: torch.accelerator.set_device_index(_index(device)),
        set_rng_state=lambda new, device=None: generators[_index(device)].set_state(new) and None,
        set_rng_state_all=set_states,
        set_stream=torch.accelerator.set_stream,
        set_sync_debug_mode=_set_sync_debug_mode,
        stream=stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(torch.device(NAME, _index(device))),
    )
    return made
