"""Offloading of the activations of waiting microbatches, such as to host memory.

A copy into host memory may be in flight while the next action runs. The computation then waits for it, and the device
memory is free. The copy back begins `AHEAD` backwards before the tensor is needed. A microbatch whose copy back would
begin no later than its device memory is free stays on the device.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from par_groups import HostCopies, HostCopy

from .._structure import tensors_of

Key = tuple[int, int]  # stage and microbatch

AHEAD = 2
"""Prefetch depth: number of microbatches before its backward at which an offloaded activation is fetched."""

BEHIND = 1
"""Number of actions during which a copy out may be in flight, after the forward that began it."""


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Options for offloading the activations of microbatches until their backward.

    By default, tensors of an accelerator are copied into pinned host memory while the device computes. The copies back
    begin two microbatches before their backward. The device then holds `resident` bytes, and the activations of three
    microbatches: of these two and the running one, or of the running one and those that are being copied out. Tensors
    on the CPU stay.

    Args:
        resident: Limit for the saved activations that stay on the device, in bytes per rank. Default: 0.
        store: Function that stores a tensor and returns a handle for `load`; replaces the copies into host memory.
        load: Function that returns the tensor of a handle from `store`.
        fetch: Function that begins to load the tensor of a handle from `store`, two microbatches ahead. None: no
            prefetch.

    Raises:
        ValueError: The number of bytes is negative, or only one of `store` and `load` is set.
    """

    resident: int = 0
    store: Callable[[Tensor], Any] | None = None
    load: Callable[[Any], Tensor] | None = None
    fetch: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.resident < 0:
            raise ValueError(f"resident is {self.resident} bytes; give 0 or more")
        if (self.store is None) != (self.load is None) or (self.fetch is not None and self.store is None):
            given = [name for name in ("store", "load", "fetch") if getattr(self, name) is not None]
            raise ValueError(f"only {given} of store, load and fetch is set; set store and load together, or neither")


class _Stored(NamedTuple):
    """Saved tensor that is offloaded."""

    value: Any


class _InFlight(NamedTuple):
    """Copies out that one action has begun, and storages that are free after them."""

    copies: list[HostCopy]
    received: list[torch.UntypedStorage]


class Activations:
    """Saved activations of this rank's microbatches, within the limit of an `ActivationOffload`.

    Args:
        offload: Options; None: all activations stay.
        modules: Stages of this rank; their parameters and buffers stay.
        copies: Copies into host memory, used if the options set no `store`. Default: a new `HostCopies`.
    """

    def __init__(
        self, offload: ActivationOffload | None, modules: Iterable[nn.Module], copies: HostCopies | None = None
    ) -> None:
        self._offload, self._modules = offload, tuple(modules)
        self._resident: dict[Key, dict[int, int]] = {}  # for each microbatch, the bytes at each address
        self._stored: dict[Key, list[Any]] = {}  # for each microbatch, what can begin to come back ahead
        self._order: list[Key] = []
        self._near: set[Key] = set()  # microbatches that would come back as soon as they are out
        self._in_flight: deque[_InFlight] = deque()  # of the last actions
        self._store: Callable[[Tensor], Any]
        self._load: Callable[[Any], Tensor]
        self._fetch: Callable[[Any], None] | None
        self._copies: HostCopies | None = None
        if offload is None or offload.store is None or offload.load is None:
            self._copies = copies or HostCopies()
            self._store, self._load, self._fetch = self._copies.store, HostCopy.load, HostCopy.fetch
        else:
            self._store, self._load, self._fetch = offload.store, offload.load, offload.fetch

    def begin(self, actions: Iterable[tuple[bool, Key]]) -> None:
        """Set the order of actions, at the start of a step.

        Args:
            actions: For each forward and each backward: whether it is a forward, its stage and its microbatch.
        """
        if self._offload is None:
            return
        forwards: dict[Key, int] = {}
        backwards: dict[Key, int] = {}
        for position, (is_forward, key) in enumerate(actions):
            (forwards if is_forward else backwards)[key] = position
        self._order = list(backwards)
        if self._copies is not None:
            # A copy is fetched by the first backward after its forward that is at most `AHEAD` before its own.
            at, self._near = list(backwards.values()), set()
            for number, key in enumerate(backwards):
                fetched = next(each for each in at[max(number - AHEAD, 0) :] if each > forwards[key])
                if fetched <= forwards[key] + BEHIND + 1:
                    self._near.add(key)

    def saving(self, key: Key) -> AbstractContextManager[object]:
        """Return a context for the forward of one stage and microbatch, which offloads saved activations."""
        if self._offload is None:
            return nullcontext()
        limit, resident, copies = self._offload.resident, self._resident, self._copies
        tensors = (tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        # Parameters and buffers stay on the device anyway, so a copy of them would free nothing.
        fixed = {_address(tensor) for tensor in tensors}
        mine = resident[key] = {}
        stored = self._stored[key] = []
        in_flight = self._advance()

        def pack(saved: Tensor) -> Any:
            # An output that is kept itself would hold its own node, which holds this: a cycle that nobody collects.
            tensor = saved.detach()
            address = _address(tensor)
            size = tensor.untyped_storage().nbytes()
            # Several saved tensors may view one storage, which counts once.
            if address in fixed or address in mine or (copies is not None and not copies.takes(tensor)):
                return tensor
            if sum(sum(sizes.values()) for sizes in resident.values()) + size <= limit:
                mine[address] = size
                return tensor
            if key in self._near:
                mine[address] = 0  # it takes memory from no other tensor, which could not be offloaded sooner
                return tensor
            value = self._store(tensor)
            if copies is not None:
                in_flight.append(value)
            if self._fetch is not None:
                stored.append(value)
            return _Stored(value)

        def unpack(saved: Any) -> Tensor:
            return self._load(saved.value) if isinstance(saved, _Stored) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def approach(self, key: Key) -> None:
        """Fetch the activations of the next backward, of that stage and microbatch, and of the two after it."""
        if self._offload is None:
            return
        self._advance()
        fetch = self._fetch
        if fetch is None or not self._order:
            return
        place = self._order.index(key)
        # Popping makes each fetch happen once, however often a window covers it.
        for near in self._order[place : place + AHEAD + 1]:
            for value in self._stored.pop(near, ()):
                fetch(value)

    def _advance(self) -> list[HostCopy]:
        """Begin an action and release what earlier actions have copied out; return the list for the action's copies."""
        self._in_flight.append(_InFlight([], []))
        while len(self._in_flight) > BEHIND + 1:
            copies, received = self._in_flight.popleft()
            for copy in copies:
                copy.release()
            for storage in received:
                storage.resize_(0)
        return self._in_flight[-1].copies

    def free_(self, received: Sequence[Tensor], output: Any) -> None:
        """Free the memory of a stage's received tensors, unless it is resident or part of the stage's output."""
        if self._offload is None:
            return
        if self._copies is not None and not any(self._copies.takes(tensor) for tensor in received):
            return
        needed = {_address(tensor) for tensor in tensors_of(output)}.union(*self._resident.values())
        copied = {_address(copy.source) for copy in self._in_flight[-1].copies if copy.source is not None}
        for tensor in received:
            if _address(tensor) in needed:
                continue
            # Backward reads the copy that `saving` has stored. A caller may still reference the received tensor, so its
            # storage is freed instead of the tensor: now, or when its copy out has ended.
            if _address(tensor) in copied:
                self._in_flight[-1].received.append(tensor.untyped_storage())
            else:
                tensor.untyped_storage().resize_(0)

    def done(self, key: Key) -> None:
        """Discard the activations of one stage and microbatch after its backward."""
        self._resident.pop(key, None)
        self._stored.pop(key, None)

    def reset(self) -> None:
        """Discard all microbatches."""
        self._resident.clear()
        self._stored.clear()
        self._in_flight.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
