"""Hooks of a layer: they begin and end each call, and record the outputs of dropped modules.

The objects here are hooks of modules. They are copied and pickled with the model, so that none may hold a closure.
"""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import compiles_frames, in_checkpoint, in_transform
from ..observe.observer import Observer, is_plain
from ..plan.table import WHOLE, Table
from .away import Away, OffloadedCall
from .frame import Frame
from .planner import CallKind, Known, Planner, joined
from .whole import Whole, Written


class Watched:
    """Call of a layer that is observed and saves only its inputs.

    Args:
        whole: Call of the complete layer.
        observer: Observer of the call.
    """

    def __init__(self, whole: Whole, observer: Observer) -> None:
        self._whole, self._observer = whole, observer
        self.table: Table | None = None

    def open(self) -> None:
        """Begin to observe."""
        self._whole.open()
        self._observer.begin()

    def close(self) -> dict[int, int]:
        """End the call, set `table`, and return the bytes of each saved storage, by the storage's identity."""
        self.table = self._observer.end()
        return self._whole.close()


class Ran(NamedTuple):
    """Finished call of a layer.

    Args:
        kind: Kind of the call; None under a policy that treats all kinds identically.
        sizes: Shapes of the tensor arguments.
        dropped: Names of the dropped modules.
        counted: Bytes of each saved storage, by the storage's identity; None under Ops.
        on_host: Bytes of each offloaded storage, by the storage's identity.
    """

    kind: CallKind | None
    sizes: tuple[torch.Size, ...]
    dropped: frozenset[str]
    counted: dict[int, int] | None
    on_host: dict[int, int]


class Layer:
    """Layer of a model that drops activations.

    Args:
        known: Layer and its observed calls.
        planner: Planner that chooses the dropped modules.
        away: Offloading of the model; None: saved tensors stay on their device.

    Attributes:
        ran: Calls in the latest forward of the model; only the latest call if the layers are called without the model.
    """

    def __init__(self, known: Known, planner: Planner, away: Away | None = None) -> None:
        self.known, self.planner, self._away = known, planner, away
        self.ran: list[Ran] = []
        self._runs: list[tuple[Frame | Whole | Watched, OffloadedCall | None, frozenset[str]] | None] = []
        self._again = False
        self._written = Written()
        self._hooked: frozenset[str] = frozenset()
        self._handles: list[Any] = []
        module = known.module
        self._own = [
            module.register_forward_pre_hook(_BeginHook(self), prepend=True, with_kwargs=True),
            module.register_forward_hook(_EndHook(self), prepend=True, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._own, *self._handles):
            handle.remove()

    def forget(self) -> None:
        """Discard the records of the latest calls."""
        self.ran = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call.

        Within a checkpoint of torch, the layer's forward runs twice and both runs must save the same tensors. Policies
        that depend on earlier calls, and offloading, are therefore skipped there.
        """
        # Calls of a layer may nest, and every end removes one entry, so a call that is skipped needs one, too.
        self._runs.append(None)
        # A call within recomputation is part of a call that was recorded in forward, and without gradients nothing is
        # saved.
        if self._again or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling() or callable(compiles_frames()):
            raise RuntimeError(
                f"layer {self.known.name!r} is being compiled, and checkpoint_layers is for eager layers; compile "
                "without it, with torch.utils.checkpoint or torch's activation_memory_budget"
            )
        if in_transform():
            raise RuntimeError(
                f"layer {self.known.name!r} runs within torch.func, whose tensors have no hooks and no storage; use a "
                "model without checkpoint_layers there, or torch.no_grad()"
            )
        within = in_checkpoint()
        if within and self.planner.is_table:
            return
        # This comes before `choose`, which counts the call: the first call of a forward sets the counts to 0.
        if not self.known.is_in(self.planner.forward):
            self.ran = []
        dropped = self.planner.choose(self.known, args, kwargs)
        away = None if self.planner.fake or within else self._away
        # Offloading opens its hooks before the run does. They are then the outer ones, to which the run passes what it
        # keeps.
        call = None if away is None else away.begin(self.known.name, self.known.module)
        run: Frame | Whole | Watched
        if dropped is None:
            module = self.known.module
            run = Watched(self._whole(args, kwargs), Observer(module, (args, kwargs), fake=self.planner.fake))
        elif WHOLE in dropped:
            run = self._whole(args, kwargs)
        else:
            self._hook(dropped)
            run = Frame(self.known.name, self.known.module)
        run.open()
        self._runs[-1] = run, call, frozenset({WHOLE}) if dropped is None else dropped

    def end(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End a call. The output is None if the call raised."""
        running = self._runs.pop() if self._runs else None
        if running is None:
            return
        run, call, dropped = running
        # Hooks on saved tensors are a stack, so the run ends before the offloading around it.
        sizes = run.close()
        on_host = {} if call is None else call.close()
        counted = None if self.planner.contexts() else sizes
        self.ran.append(Ran(self.known.current, self.known.sizes, dropped, counted, on_host))
        # The table of a call that raised ends in the middle, so it is thrown away, and the next call is observed.
        if isinstance(run, Watched) and run.table is not None and output is not None:
            self.planner.record(self.known, args, kwargs, run.table)

    def note(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the output of a dropped module, unless its arguments differ in form from the observed call."""
        running = self._runs[-1] if self._runs else None
        run = None if running is None else running[0]
        if isinstance(run, Frame) and len(args) == 1 and not kwargs and is_plain(args[0]) and is_plain(output):
            run.note(joined(self.known.name, name), module, args[0], output)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer again, including the hooks that other code has put on it."""
        # The call below runs the layer's own hooks, too; `begin` must not take it for a call of forward.
        before, self._again = self._again, True
        self.planner.in_backward = True
        began = self._now() if self.planner.measures else None
        try:
            return self.known.module(*args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self._again = before
            if began is not None:
                self.planner.ran_again.append((self.known, self._now() - began))

    def _now(self) -> float:
        """Wait for the device, then return the seconds of a clock."""
        device = next((parameter.device.type for parameter in self.known.module.parameters()), "cpu")
        if device != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter()

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Whole:
        return Whole(self.known.module, self._written, self, args, kwargs, self.planner.contexts())

    def _hook(self, dropped: frozenset[str]) -> None:
        """Move the hooks from the modules dropped so far to the modules that are dropped now."""
        if dropped == self._hooked:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = [
            self.known.module.get_submodule(name).register_forward_hook(
                _DroppedOutputHook(self, name), prepend=True, with_kwargs=True
            )
            for name in sorted(dropped)
        ]
        self._hooked = dropped


class Enter:
    """Hook before a model's forward.

    Args:
        planner: Planner that counts the forwards.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __call__(self, *_: Any) -> None:
        """Begin a forward."""
        self._planner.enter()


class Leave:
    """Hook after a model's forward; it also runs if the forward raised.

    Args:
        planner: Planner that counts the forwards.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def __call__(self, *_: Any) -> None:
        """End a forward."""
        self._planner.leave()


class _BeginHook:
    """Hook before a layer's forward."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call."""
        self._layer.begin(args, kwargs)


class _EndHook:
    """Hook after a layer's forward; it also runs if the forward raised."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """End the call."""
        self._layer.end(args, kwargs, output)


class _DroppedOutputHook:
    """Hook after the forward of a dropped module."""

    def __init__(self, layer: Layer, name: str) -> None:
        self._layer, self._name = layer, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the module's output."""
        self._layer.note(self._name, module, args, kwargs, output)
