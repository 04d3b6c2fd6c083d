"""One call of a layer that drops the outputs of some modules, and recomputes them when backward unpacks them.

While the layer runs, each dropped module records a note of its output's storage and of its input. The note replaces
every tensor that autograd saves from that storage. All other tensors are passed to the saved-tensor hooks around the
layer, if there are any. Backward unpacks a note by calling the module's forward again; the input of that call may be a
note, too. A recomputed output stays until its last use.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch_private import StorageWeakRef, identity_of, outer_hooks, version_of
from ..observe.observer import is_plain, to_keep
from .packed import Geometry, Kept, Packed, Part, take, use
from .then import Then


class DroppedOutput:
    """Dropped output of a module, with all that is needed to recompute it.

    Args:
        name: Name of the module within the model, for errors.
        module: Module whose forward is called again.
        source: Packed input: a saved tensor, or a part of another note's output.
        input_: Input of the call; only its requires_grad and device are read.
        output: Output of the call; only its geometry and version are read.
    """

    __slots__ = (
        "_autocast",
        "_device",
        "_geometry",
        "_left",
        "_made",
        "_module",
        "_name",
        "_requires_grad",
        "_then",
        "dtype",
        "source",
        "uses",
        "version",
    )

    def __init__(self, name: str, module: nn.Module, source: Packed, input_: Tensor, output: Tensor) -> None:
        self._name, self._module, self.source = name, module, source
        self._requires_grad = input_.requires_grad
        self._geometry, self.version, self.dtype = Geometry.of(output), version_of(output), output.dtype
        self._then = Then(module)
        self._device = input_.device
        self._autocast = _autocast(input_.device.type)
        self.uses = self._left = 0
        self._made: Tensor | None = None

    def take(self) -> Tensor:
        """Return the output; the first use recomputes it, and the last use releases it."""
        if self._made is None:
            self._made, self._left = self._make(), self.uses
        made, self._left = self._made, self._left - 1
        if self._left <= 0:
            self._made = None
        return made

    def _make(self) -> Tensor:
        """Call the module's forward again, with gradients enabled and under the original autocast.

        Raises:
            RuntimeError: The module's parameters or buffers were changed in place since, or the module returns another
                layout than in forward, or draws random numbers.
        """
        source = self.source.take().detach().requires_grad_(self._requires_grad)
        self._then.check(f"module {self._name!r}")
        random = _random(self._device)
        # The graph of this call is never used, so what it would save is thrown away at once.
        # Some modules choose another kernel without gradients, such as the fast path of nn.TransformerEncoderLayer.
        with torch.enable_grad(), self._autocast(), self._then.restored(), saved_tensors_hooks(_nothing, _never):
            made: Tensor = self._module.forward(source).detach()
        if any(not torch.equal(now, before) for now, before in zip(_random(self._device), random, strict=True)):
            raise RuntimeError(
                f"module {self._name!r} draws random numbers, which it did not when it was looked at; drop only "
                "modules that give the same for the same input"
            )
        if Geometry.of(made) != self._geometry:
            raise RuntimeError(
                f"module {self._name!r} gave {self._geometry} in forward, and {Geometry.of(made)} when it was called "
                "again; drop only modules that give the same for the same input"
            )
        return made


class Frame:
    """One call of a layer that drops module outputs, between `open` and `close`.

    Args:
        layer: Name of the layer, for errors.
        module: Layer.
    """

    def __init__(self, layer: str, module: nn.Module) -> None:
        self._layer, self._module = layer, module
        self._alive: list[StorageWeakRef] = []  # while these are there, no identity is given to another storage
        self._notes: dict[int, DroppedOutput] = {}  # by storage
        self._all: list[DroppedOutput] = []
        self._resident: dict[int, int] = {}  # bytes of storages that are kept
        self._kept: dict[tuple[int, Geometry, int], tuple[Kept, int]] = {}
        self._outer = outer_hooks()

    def open(self) -> None:
        """Begin to pack saved tensors."""
        self._hooks = saved_tensors_hooks(self._pack_use, take)
        self._hooks.__enter__()

    def close(self) -> dict[int, int]:
        """End the call, and return the bytes of each saved storage by its identity, without parameters and buffers.

        A note records a module output that backward will recompute. This method discards notes that no saved tensor
        uses, and the inputs that only such notes need.
        """
        self._hooks.__exit__()
        del self._hooks  # which would hold the call that holds it
        for note in reversed(self._all):
            # Later notes may use earlier ones as inputs, so the loop goes backwards: dropping one may free those before
            # it.
            if note.uses == 0:
                use(note.source, -1)
        kept = {identity for kept, identity in self._kept.values() if kept.uses > 0}
        fixed = {
            identity_of(tensor.untyped_storage())
            for tensor in (*self._module.parameters(), *self._module.buffers())
            if is_plain(tensor)
        }
        sizes = {identity: self._resident[identity] for identity in kept - fixed}
        # From here on, the graph alone owns the notes and tensors: a frame that held them would keep their memory.
        self._notes.clear()
        self._all.clear()
        self._kept.clear()
        self._resident.clear()
        self._alive.clear()
        return sizes

    def note(self, name: str, module: nn.Module, source: Tensor, output: Tensor) -> None:
        """Record that a module has returned an output that is dropped.

        Args:
            name: Name of the module within the model.
            module: Module.
            source: Input, a plain tensor.
            output: Output, a plain tensor.
        """
        storage = output.untyped_storage()
        identity = identity_of(storage)
        # An output within its own input cannot be dropped: the input, which is needed to recompute it, would keep its
        # memory.
        if identity == identity_of(source.untyped_storage()):
            return
        before = self._notes.get(identity)
        if before is not None and (before.version, before.dtype) == (version_of(output), output.dtype):
            return  # an inner module made it
        note = DroppedOutput(name, module, self._pack(source), source, output)
        # A note unpacks its input once, whenever it is made again; `close` takes this back if nobody needs the note.
        use(note.source)
        self._alive.append(StorageWeakRef(storage))
        self._notes[identity] = note
        self._all.append(note)

    def _pack_use(self, tensor: Tensor) -> Packed:
        if not is_plain(tensor):  # its elements are not looked for
            return use(self._keep(tensor, version_of(tensor)))
        return use(self._pack(tensor))

    def _pack(self, tensor: Tensor) -> Packed:
        """Return the packed form of a tensor: a part of a dropped output, or the saved tensor."""
        storage = tensor.untyped_storage()
        identity, geometry, version = identity_of(storage), Geometry.of(tensor), version_of(tensor)
        # `replay` in plan/table.py decides in the same way; if the two differed, the predicted bytes would be wrong.
        if identity not in self._resident:
            note = self._notes.get(identity)
            # After a write in place, recomputation would return the elements before the write, so such a tensor is
            # stored.
            if note is not None and (note.version, note.dtype) == (version, tensor.dtype):
                return Part(note, geometry)
            self._resident[identity] = storage.nbytes()
            self._alive.append(StorageWeakRef(storage))
        key = identity, geometry, version
        if key not in self._kept:
            self._kept[key] = self._keep(tensor, version), identity
        return self._kept[key][0]

    def _keep(self, tensor: Tensor, version: int) -> Kept:
        if self._outer is not None:
            pack, unpack = self._outer
            return Kept(pack(tensor), unpack, version, self._layer)
        return Kept(to_keep(tensor), None, version, self._layer)


def _nothing(tensor: Tensor) -> None:
    """Discard a tensor."""
    del tensor


def _never(_: object) -> NoReturn:
    raise AssertionError("the graph of a module that is called again has no backward")


def _random(device: torch.device) -> list[Tensor]:
    """Return the random number state of the CPU and, for another device, of that device."""
    module = None if device.type in {"cpu", "meta"} else torch.get_device_module(device)
    others = [] if module is None else [module.get_rng_state(device)]
    return [torch.get_rng_state(), *others]


def _autocast(device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of contexts that restore the current autocast of a device type."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    enabled = torch.is_autocast_enabled(device_type)
    dtype, cache = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=cache)
