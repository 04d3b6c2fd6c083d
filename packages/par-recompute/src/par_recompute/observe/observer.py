"""Observer of one call of a layer: the tensors that autograd saves, the modules that made them and can run again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from par_groups import WatchedWeight, is_compiled

from .._torch_private import (
    FakeTensor,
    StorageWeakRef,
    TorchDispatchMode,
    flops_of,
    identity_of,
    outer_hooks,
    tree_leaves,
    version_of,
)
from ..plan.table import WHOLE, Made, Module, Saved, Table

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
_NEW = ("lift_fresh", "lift_fresh_copy")  # a tensor that Python code has just made out of numbers


def is_plain(tensor: object) -> bool:
    """Return whether a tensor has a strided storage of its own; most subclasses have not."""
    plain = {Tensor, nn.Parameter, WatchedWeight, FakeTensor}  # a watched weight is a parameter that notes its aliases
    return type(tensor) in plain and tensor.layout == torch.strided  # type: ignore[attr-defined]


def to_keep(tensor: Tensor) -> Tensor:
    """Return the tensor that a hook keeps for a saved one, so that it does not keep its own graph."""
    # The graph of a result that its own node saves would hold the result. A leaf may get its elements elsewhere, as
    # the parameters of ZeRO 3 do, so it stays itself.
    return tensor if tensor.grad_fn is None else tensor.detach()


@dataclass
class _ModuleCall:
    """Running call of a module.

    Args:
        name: Name of the module, relative to the layer.
        module: Module.
        input: Single tensor argument of the call; None if the module was called in another way.
        version: Version of `input` at the call.
        state: Versions of the module's parameters and buffers at the call.
        random: State of the CPU's random numbers at the call; None on fake tensors.
        known: Numbers of the storages that the module may read.
    """

    name: str
    module: nn.Module
    input: Tensor | None
    version: int
    state: list[tuple[int, int]]
    random: Tensor | None
    known: set[int]
    flops: int = 0
    moved: int = 0
    obstacles: list[str] = field(default_factory=list)
    draws: bool = False
    communicates: bool = False
    writes: bool = False


class Observer(TorchDispatchMode):
    """Observer of one call of a layer; its hooks on the layer's modules are active between `begin` and `end`.

    Args:
        layer: Layer.
        args: Arguments of the call, including keyword arguments.
        fake: Whether the layer runs on fake tensors, where no random number is drawn. Default: False.
    """

    def __init__(self, layer: nn.Module, args: Any, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._fake = layer, fake
        self._numbers: dict[int, int] = {}  # of storages, by their identity
        self._sizes: list[int] = []
        self._alive: list[StorageWeakRef] = []  # while these are there, no identity is given to another storage
        self._events: list[Made | Saved] = []
        self._makers: dict[int, list[tuple[int, int, torch.dtype]]] = {}  # by storage: event, version, dtype
        self._modules: dict[str, Module] = {}
        self._total = [0, 0]  # operations and bytes moved, so far
        self._until_saved = (0, 0)
        self._handles: list[Any] = []
        # The layer is the bottom of the stack of calls: what runs outside its modules counts for it alone.
        self._calls = [_ModuleCall(WHOLE, layer, None, 0, [], self._random(), set())]
        given = [leaf for leaf in tree_leaves(args) if is_plain(leaf)]
        self._inputs = frozenset(self._number(tensor) for tensor in given)

    def begin(self) -> None:
        """Begin to observe: install hooks on the modules, on saved tensors and on operations."""
        for name, module in self._layer.named_modules():
            if name:
                self._handles += [
                    module.register_forward_pre_hook(self._enter(name), with_kwargs=True),
                    # The hook must come first: other hooks of the module may replace its output, and are not part of
                    # `forward`.
                    module.register_forward_hook(self._leave, prepend=True, with_kwargs=True),
                ]
        outer = outer_hooks()

        def pack(tensor: Tensor) -> Any:
            with torch.no_grad():
                self._saved(tensor)
            return to_keep(tensor) if outer is None else outer[0](tensor)

        if outer is not None:
            update_wrapper(pack, outer[0])  # who asks for the hooks around sees whose they are
        self._hooks = saved_tensors_hooks(pack, (lambda packed: packed) if outer is None else outer[1])
        self._hooks.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Table:
        """Stop observing and return the table of the call."""
        self.stop()
        while len(self._calls) > 1:  # an exception went by these
            self._calls.pop()
        self._note_module(self._calls[0], None)
        fixed = {
            self._numbers[identity]
            for tensor in (*self._layer.parameters(), *self._layer.buffers())
            # Parameters and buffers exist anyway, so saving them costs no memory.
            if is_plain(tensor) and (identity := identity_of(tensor.untyped_storage())) in self._numbers
        }
        inputs = self._inputs - fixed
        sizes = tuple(0 if number in fixed else size for number, size in enumerate(self._sizes))
        names = [name for name, _ in self._layer.named_modules() if name in self._modules]
        return Table(
            sizes=sizes,
            inputs=inputs,
            events=tuple(self._events),
            modules={name: self._modules[name] for name in names},
            flops=self._until_saved[0],
            moved=self._until_saved[1],
        )

    def stop(self) -> None:
        """Stop observing without a result."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)
        del self._hooks  # which would hold what holds it
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation for every module that is running."""
        kwargs = dict(kwargs or {})
        output = func(*args, **kwargs)
        read = [leaf for leaf in tree_leaves((args, kwargs)) if is_plain(leaf)]
        made = [leaf for leaf in tree_leaves(output) if is_plain(leaf)]
        flops = flops_of(func, args, kwargs, output)
        moved = 0 if func.is_view else sum(each.numel() * each.element_size() for each in (*read, *made))
        self._total[0] += flops
        self._total[1] += moved
        # A tensor made out of Python numbers comes from nowhere, but its creation looks like a read.
        sources = set() if func.overloadpacket.__name__ in _NEW else {self._number(each) for each in read}
        results = {self._number(each) for each in made}
        writes = _writes_statistics(func, args, kwargs)
        for call in self._calls:
            call.flops += flops
            call.moved += moved
            call.writes |= writes
            call.draws |= torch.Tag.nondeterministic_seeded in func.tags
            call.communicates |= func.namespace in _COLLECTIVES
            # A module that reads from elsewhere, such as an attribute set by another module, may find other elements
            # there in backward.
            if call.name and not sources <= call.known:
                call.obstacles.append("reads what is neither its input nor its own")
            call.known |= results
        return output

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; number the storage if it is new."""
        storage = tensor.untyped_storage()
        identity = identity_of(storage)
        if identity not in self._numbers:
            self._numbers[identity] = len(self._sizes)
            self._sizes.append(storage.nbytes())
            self._alive.append(StorageWeakRef(storage))
        return self._numbers[identity]

    def _random(self) -> Tensor | None:
        return None if self._fake else torch.get_rng_state()

    def _makers_of(self, tensor: Tensor, number: int) -> tuple[int, ...]:
        """Return the events whose output contains the tensor, unchanged since; innermost module first."""
        # `as_strided` cannot change the dtype, so a view with another dtype cannot be cut out of a recomputed output.
        now = version_of(tensor), tensor.dtype
        return tuple(event for event, *then in self._makers.get(number, ()) if tuple(then) == now)

    def _saved(self, tensor: Tensor) -> None:
        if is_plain(tensor):
            number = self._number(tensor)
            self._events.append(Saved(number, self._makers_of(tensor, number)))
            # Checkpointing stops to recompute at the last saved tensor, so what follows it costs nothing.
            self._until_saved = (self._total[0], self._total[1])

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            alone = len(args) == 1 and not kwargs and is_plain(args[0])
            own = [tensor for tensor in (*module.parameters(), *module.buffers()) if is_plain(tensor)]
            self._calls.append(
                _ModuleCall(
                    name,
                    module,
                    args[0] if alone else None,
                    version_of(args[0]) if alone else 0,
                    _state(module),
                    self._random(),
                    {self._number(tensor) for tensor in (*own, *(args if alone else ()))},
                )
            )

        return enter

    def _leave(self, module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
        while self._calls[-1].module is not module:  # what the layer itself has caught left these behind
            self._calls.pop()
        call = self._calls.pop()
        with torch.no_grad():
            self._note_module(call, output)

    def _note_module(self, call: _ModuleCall, output: Any) -> None:
        """Record a finished call: its obstacle, or an event if the module can be called again."""
        random = self._random()
        call.draws |= random is not None and not torch.equal(random, call.random)  # type: ignore[arg-type]
        call.writes |= call.name != WHOLE and _state(call.module) != call.state
        obstacle = None if call.name == WHOLE else self._obstacle(call, output)
        if obstacle is None and call.name != WHOLE:
            source = call.input
            assert source is not None  # noqa: S101 - the obstacle would say so
            read, number = self._number(source), self._number(output)
            event = Made(call.name, read, self._makers_of(source, read), call.flops, call.moved)
            # The number of an event is its place in the list, so it is taken before the event is added.
            self._makers.setdefault(number, []).append((len(self._events), version_of(output), output.dtype))
            self._events.append(event)
        before = self._modules.get(call.name)
        self._modules[call.name] = Module(
            flops=call.flops + (before.flops if before else 0),
            moved=call.moved + (before.moved if before else 0),
            # A module that is called several times in a layer has one row, so one call with an obstacle rules out all
            # of them.
            obstacle=obstacle or (before.obstacle if before else None),
            draws=call.draws or (before is not None and before.draws),
            communicates=call.communicates or (before is not None and before.communicates),
            writes=call.writes or (before is not None and before.writes),
        )

    def _obstacle(self, call: _ModuleCall, output: Any) -> str | None:
        """Return why a module cannot be called again, or None."""
        given = call.input
        # Each question holds only if those before it were answered: a storage is compared only if there is one.
        if given is None:
            return "takes not one tensor alone"
        if not is_plain(output):
            return "gives not one tensor alone"
        if version_of(given) != call.version:
            return "changes its input in place"
        if self._number(output) == self._number(given):
            return "gives its input, or a view of it"
        if call.draws:
            return "draws random numbers"
        if call.communicates:
            return "calls a collective"
        if call.writes:
            return "writes into its buffers or parameters"
        if any(is_compiled(module) for module in call.module.modules()):
            return "is compiled"
        return call.obstacles[0] if call.obstacles else None


def _state(module: nn.Module) -> list[tuple[int, int]]:
    """Return identities and versions of parameters and buffers; they change if one is replaced or written into."""
    return [(id(tensor), version_of(tensor)) for tensor in (*module.parameters(), *module.buffers())]


def _writes_statistics(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation writes running statistics; batch norm does so without raising their version."""
    if "batch_norm" not in operation.overloadpacket.__name__:
        return False
    given = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
    training = given.get("train", given.get("training", True))
    return bool(training) and given.get("running_mean") is not None


@contextmanager
def looking_on(layer: nn.Module, args: Any, *, fake: bool = False) -> Iterator[list[Table]]:
    """Observe one call of a layer inside the context; the yielded list holds the table afterwards."""
    tables: list[Table] = []
    observer = Observer(layer, args, fake=fake)
    observer.begin()
    try:
        yield tables
    except BaseException:
        observer.stop()
        raise
    tables.append(observer.end())
