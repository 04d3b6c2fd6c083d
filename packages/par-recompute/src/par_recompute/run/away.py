"""Offloading of saved activations to host memory.

Each call of a layer offers the storages of its saved tensors. A storage that exceeds the `resident` limit is offloaded,
once for all tensors in it. The device memory is released `ahead` calls later, when the copy has probably ended. When
backward first unpacks a tensor of a call, the storages of the `ahead` calls before it are prefetched.

Backward reaches the last calls of a forward before their device memory is released. A copy of them would be wasted, so
the next forward of the same length does not begin it.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from par_groups import HostCopies, HostCopy

from .._to_host import ToHost
from .._torch_private import StorageWeakRef, identity_of, outer_hooks, version_of
from ..observe.observer import is_plain, to_keep
from .packed import Geometry, Kept, Packed, Part, changed_since, take, use

Key = tuple[int, int, torch.dtype]  # identity of a storage, version, and how its elements are read


class Elements(Kept):
    """Elements of a storage, offloaded or resident.

    Args:
        storage: Storage.
        args: Arguments of `Kept`.
        copy: Copy of an offloaded storage in host memory; None if it is resident, or with the `store` of the options.
        is_stored: Whether the storage is offloaded.
    """

    __slots__ = ("__weakref__", "_is_fetched", "_storage", "copy", "is_stored", "size")

    def __init__(self, storage: Any, *args: Any, copy: HostCopy | None = None, is_stored: bool) -> None:
        super().__init__(*args)
        self.copy, self.is_stored, self._is_fetched = copy, is_stored, False
        self._storage = StorageWeakRef(storage)  # whose identity is given to no other meanwhile
        self.size: int = storage.nbytes()

    def take(self) -> Tensor:
        """Return the elements.

        Raises:
            RuntimeError: The elements were changed in place since, or during their copy out.
        """
        source = None if self.copy is None else self.copy.source
        if source is not None and version_of(source) != self._version:
            changed_since(source, self._version, f"layer {self._layer!r}")
        return super().take()

    def fetch(self, fetch: Callable[[Any], None]) -> None:
        """Begin to load the elements, unless they are on the device or this has begun."""
        is_on_device = self._loaded is not None or (self.copy is not None and self.copy.is_on_device)
        if not is_on_device and not self._is_fetched:
            # Several earlier calls may hold the elements, and each would begin the same load again.
            self._is_fetched = True
            fetch(self._value)

    def let_go(self) -> None:
        """Release the device memory after the copy out; keep it if the elements were written into since."""
        copy = self.copy
        # A write during the copy may have reached the host copy, too. `take` then compares versions and raises.
        if copy is None or copy.source is None or version_of(copy.source) != self._version:
            return
        if copy.host is None:  # the next call runs while the copy is in flight
            copy.send()
        else:
            copy.release()


class OffloadedCall:
    """One call of a layer with offloading, between `open` and `close`.

    Args:
        away: Offloading of the model.
        number: Number of earlier calls, of all layers.
        layer: Name of the layer, for errors.
        module: Layer.
        comes_first: Whether backward will probably reach the call before its device memory is released.

    Attributes:
        stored: Weak references to the call's offloaded storages; the autograd graph owns them.
        is_approached: Whether the call's backward has begun.
    """

    def __init__(self, away: "Away", number: int, layer: str, module: nn.Module, *, comes_first: bool) -> None:
        self._away, self.number, self._layer, self._module = away, number, layer, module
        self._comes_first = comes_first
        self.stored: list[ref[Elements]] = []
        self.is_approached = False
        self._sizes: dict[int, int] = {}

    def open(self) -> None:
        """Begin to offload saved tensors."""
        self._outer = outer_hooks()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def close(self) -> dict[int, int]:
        """End the call and return the bytes of each offloaded storage, by the storage's identity."""
        self._hooks.__exit__()
        del self._hooks  # which would hold the call that holds it
        return self._sizes

    def _pack(self, tensor: Tensor) -> "tuple[OffloadedCall, Packed]":
        elements = self._elements(tensor)
        # Every packed tensor holds its call, and nothing else does: a call lives as long as its part of the graph.
        return self, Kept(*self._staying(tensor)) if elements is None else use(Part(elements, Geometry.of(tensor)))

    def _unpack(self, packed: "tuple[OffloadedCall, Packed]") -> Tensor:
        self._away.approach(self)
        return take(packed[1])

    def _elements(self, tensor: Tensor) -> Elements | None:
        """Return the elements of a tensor's storage; None for parameters, buffers and CPU tensors, which stay."""
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or not self._away.takes(tensor):
            return None
        storage = tensor.untyped_storage()
        key = identity_of(storage), version_of(tensor), tensor.dtype
        # Several layers may save one tensor, such as an attention mask, and it must be copied only once.
        elements = self._away.known(key)
        # Parameters and buffers are on the device anyway, so a copy of one in host memory would free nothing.
        if elements is None and not isinstance(tensor, nn.Parameter) and key[0] not in self._fixed():
            # The complete storage is copied, because its memory can be released only if no tensor in it stays on the
            # device.
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            if self._away.has_room(storage.nbytes()):
                elements = Elements(storage, *self._staying(flat), is_stored=False)
            else:
                elements = self._away.store(storage, flat, self._layer, at_once=not self._comes_first)
                self.stored.append(ref(elements))
            self._away.note(key, elements)
        if elements is not None and elements.is_stored:
            self._sizes[key[0]] = elements.size
        return elements

    def _fixed(self) -> set[int]:
        tensors = (*self._module.parameters(), *self._module.buffers())
        return {identity_of(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)}

    def _staying(self, tensor: Tensor) -> tuple[Any, Any, int, str]:
        """Return the arguments of `Kept` for a tensor that stays or is passed to the hooks around the layer."""
        version = version_of(tensor)
        if self._outer is not None:
            pack, unpack = self._outer
            return pack(tensor), unpack, version, self._layer
        return to_keep(tensor), None, version, self._layer


class Away:
    """Offloaded storages of one model, and the order of its layers' calls.

    Args:
        to_host: Options.
        copies: Copies into host memory, used if the options set no `store`. Default: a new `HostCopies`.
    """

    def __init__(self, to_host: ToHost, copies: HostCopies | None = None) -> None:
        self._to_host, self._copies = to_host, copies or HostCopies()
        self._limit, self._resident = to_host.bytes, 0
        self._elements: WeakValueDictionary[Key, Elements] = WeakValueDictionary()
        self._calls: WeakValueDictionary[int, OffloadedCall] = WeakValueDictionary()
        self._count = 0
        # Positions of calls since no graph was left, such as since the last training step: those that backward reached
        # before their release, in the round before and in this one.
        self._first_call = 0
        self._came_first: set[int] = set()
        self._coming_first: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle only the options."""
        return type(self), (self._to_host,)

    def begin(self, layer: str, module: nn.Module) -> OffloadedCall:
        """Begin a call of a layer, and release what calls more than `ahead` calls earlier have copied out.

        Args:
            layer: Name of the layer, for errors.
            module: Layer.
        """
        # A round without backward has seen nothing, so what the round before it has learnt stays.
        if not self._calls and self._coming_first:
            self._came_first, self._coming_first = self._coming_first, set()
        if not self._calls:
            self._first_call = self._count
        comes_first = self._count - self._first_call in self._came_first
        call = OffloadedCall(self, self._count, layer, module, comes_first=comes_first)
        # The dictionary is weak, so an entry may go while the loop runs; the list holds them all.
        for number, earlier in list(self._calls.items()):
            if number < call.number - self._to_host.ahead:
                for elements in _alive(earlier):
                    elements.let_go()
        self._calls[call.number] = call
        self._count += 1
        call.open()
        return call

    def approach(self, call: OffloadedCall) -> None:
        """Prefetch the storages of the `ahead` calls before this call, when backward first reaches it."""
        if call.is_approached:
            return
        call.is_approached = True
        # The elements are still on the device, so their copy out was for nothing: the next round does not begin it.
        if any(elements.copy is not None and elements.copy.source is not None for elements in _alive(call)):
            self._coming_first.add(call.number - self._first_call)
        fetch = HostCopy.fetch if self._to_host.store is None else self._to_host.fetch
        if fetch is None:
            return
        # Backward visits the calls in reverse order, so the latest earlier calls are needed first.
        numbers = sorted((number for number in list(self._calls) if number < call.number), reverse=True)
        for number in numbers[: self._to_host.ahead]:
            for elements in _alive(self._calls.get(number)):
                elements.fetch(fetch)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be offloaded."""
        return self._to_host.store is not None or self._copies.takes(tensor)

    def known(self, key: Key) -> Elements | None:
        """Return the elements of a storage that was saved before; None if it is new."""
        return self._elements.get(key)

    def has_room(self, size: int) -> bool:
        """Return whether `size` more bytes may stay on the device."""
        return self._resident + size <= self._limit

    def store(self, storage: Any, flat: Tensor, layer: str, *, at_once: bool) -> Elements:
        """Offload the elements of a storage.

        Args:
            storage: Storage.
            flat: Content of the storage, as a 1-D tensor.
            layer: Name of the layer, for errors.
            at_once: Whether a copy into host memory begins now; otherwise it begins when it is released.
        """
        store, load, version = self._to_host.store, self._to_host.load, version_of(flat)
        if store is not None and load is not None:
            return Elements(storage, store(flat), load, version, layer, is_stored=True)
        copy = self._copies.hold(flat)
        if at_once:
            copy.send()
        return Elements(storage, copy, HostCopy.load, version, layer, copy=copy, is_stored=True)

    def note(self, key: Key, elements: Elements) -> None:
        """Register elements by key, and count resident ones until they are freed."""
        self._elements[key] = elements
        if not elements.is_stored:
            self._resident += elements.size
            # The graph owns the elements, so only their end tells when backward has released the memory.
            finalize(elements, self._free, elements.size).atexit = False

    def _free(self, size: int) -> None:
        self._resident -= size


def _alive(call: OffloadedCall | None) -> list[Elements]:
    """Return the offloaded elements of a call that the autograd graph still holds."""
    return [] if call is None else [elements for each in call.stored if (elements := each()) is not None]
