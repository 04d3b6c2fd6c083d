"""What the device does when torch asks it for an operator: the CPU's kernel, on memory of the device.

Every operator that torch does not compose of others arrives here. Its tensors are noted as read or written on the
current stream, the CPU's kernel runs on the same memory, and its results go into memory of the device. It runs at once,
so values are right whatever the program does; whether a GPU might have run it earlier or later, `native` says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .costs import seconds_of_kernel
from .options import NAME
from .overrides import OVERRIDES
from .state import state

_aten = torch.ops.aten

_WAITS = {
    _aten._local_scalar_dense: "item() or bool()",
    _aten.nonzero: "nonzero()",
    _aten.masked_select: "masked_select()",
    _aten.unique_consecutive: "unique_consecutive()",
    _aten._unique2: "unique()",
    _aten.equal: "torch.equal()",
    _aten.bincount: "bincount()",
}
"""Operators for which the host needs a number that the device has computed."""

_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
"""Operators that take indices of the host, which they copy to the device."""


@dataclass(frozen=True)
class _Known:
    """What the schema of an operator specifies.

    Attributes:
        run: The CPU's kernel.
        name: How errors name it.
        arguments: The names of its arguments.
        writes: For each argument, whether it is written.
        tensors: For each argument, whether it is a tensor, for which Python may have given a number.
        outputs: The names of arguments that the kernel may resize.
        results: For each result, the argument that it is or views, and whether it is that argument itself.
        waits: Why the host waits; empty if it does not.
        draws: Whether it draws random numbers.
    """

    run: Callable[..., Any]
    name: str
    arguments: tuple[str, ...]
    writes: tuple[bool, ...]
    tensors: tuple[bool, ...]
    outputs: frozenset[str]
    results: tuple[tuple[int, bool] | None, ...]
    waits: str
    draws: bool


_known: dict[Any, _Known] = {}


def _learn(operator: Any) -> _Known:
    """Read an operator's schema."""
    schema, packet = operator._schema, operator._overloadpacket
    aliases = [argument.alias_info.before_set if argument.alias_info else set() for argument in schema.arguments]

    def source(result: Any) -> tuple[int, bool] | None:
        if result.alias_info is None:
            return None
        of = result.alias_info.before_set
        number = next((i for i, names in enumerate(aliases) if names & of), None)
        return None if number is None else (number, result.alias_info.is_write)

    return _Known(
        run=OVERRIDES.get(packet, operator),
        name=packet._qualified_op_name.removeprefix("aten::"),
        arguments=tuple(argument.name for argument in schema.arguments),
        writes=tuple(bool(each.alias_info and each.alias_info.is_write) for each in schema.arguments),
        tensors=tuple(isinstance(each.type, torch.TensorType) for each in schema.arguments),
        outputs=frozenset(argument.name for argument in schema.arguments if argument.is_out),
        results=tuple(source(result) for result in schema.returns),
        waits=_WAITS.get(packet, ""),
        draws=torch.Tag.nondeterministic_seeded in operator.tags,
    )


def kernel(operator: Any, *args: Any, **named: Any) -> Any:
    """Run an operator on the current stream.

    Raises:
        RaceError: It uses memory that another stream may be using.
        HostWaitError: The host would wait for the device, which the test refuses.
        RuntimeError: Some of its tensors reside on the host.
    """
    known = _known.get(operator)
    if known is None:
        known = _known[operator] = _learn(operator)
    native = state.native
    run = _Run(native.open(known.name), indexing=operator._overloadpacket in _INDEXING)
    given = [
        native.number(value) if is_tensor and isinstance(value, (int, float)) else run.take(value, write=write)
        for value, write, is_tensor in zip(args, known.writes, known.tensors, strict=False)
    ]
    by_name = {name: _by_name(run, known, name, value) for name, value in named.items()}
    if known.waits or run.waits:
        state.wait(run.call, known.waits or run.waits)
    if known.draws:
        generator = next((each for each in (*args, *named.values()) if isinstance(each, torch.Generator)), None)
        generator = generator or native.default_generator(-1)
        native.swap_random(generator)
        try:
            made = known.run(*given, **by_name)
        finally:
            native.swap_random(generator)
    else:
        made = known.run(*given, **by_name)
    run.put_back()
    if known.name.startswith("_foreach_"):
        # autograd counts writes to single tensors; those to lists are counted by the kernels of CUDA, and so here.
        lists = (value for value, write in zip(args, known.writes, strict=False) if write)
        increment_version([tensor for tensors in lists for tensor in tensors if not tensor.is_inference()])
    several = isinstance(made, tuple) and len(known.results) > 1
    results = []
    for one, source in zip(made if several else (made,), known.results, strict=True) if known.results else ():
        results.append(_result(run, known, one, source, args, named))
    result = tuple(results) if several else results[0] if results else None
    state.close(run.call, seconds_of_kernel(state.rules.costs, operator, args, named, result, run.moved), "compute")
    return result


class _Run:
    """The arguments of one call, on their way to the CPU's kernel and back.

    Args:
        call: The call.
        indexing: Whether its operator takes indices of the host.
    """

    def __init__(self, call: Any, *, indexing: bool) -> None:
        self.call, self.indexing = call, indexing
        self.waits, self.moved = "", 0
        self._outputs: list[tuple[Tensor, Tensor]] = []

    def take(self, value: Any, *, write: bool) -> Any:
        """Return an argument as the CPU's kernel takes it."""
        if isinstance(value, Tensor):
            return self._tensor(value, write=write)
        if isinstance(value, (list, tuple)):
            return [self.take(each, write=write) for each in value]
        return None if isinstance(value, torch.Generator) else value  # the default one, whose state is lent to it

    def _tensor(self, tensor: Tensor, *, write: bool) -> Tensor:
        if tensor.device.type == NAME:
            if self.indexing and tensor.dtype in (torch.bool, torch.uint8) and not write:
                self.waits = "a mask as an index"
            self.moved += tensor.nbytes
            return state.use(self.call, tensor, write=write)  # type: ignore[no-any-return]
        if tensor.dim() and tensor.device.type == "cpu":  # a number of the host travels with the launch
            if not self.indexing:
                raise RuntimeError(
                    f"{self.call.name} got a tensor on the host, {list(tensor.shape)}, together with tensors on the "
                    f"device at {self.call.sites}; move it there first"
                )
            self.waits = "indices that are copied to the device"
        return tensor

    def out(self, value: Any) -> Any:
        """Return memory of its own for an output, which the CPU's kernel may resize; `put_back` copies from it."""
        if not isinstance(value, Tensor):
            return [self.out(each) for each in value]
        fresh = torch.empty(0, dtype=value.dtype)
        self._outputs.append((value, fresh))
        return fresh

    def put_back(self) -> None:
        """Give outputs the shape and the values that the kernel has written."""
        for tensor, fresh in self._outputs:
            if fresh.shape != tensor.shape:
                tensor.resize_(fresh.shape)
            if fresh.numel():
                self.moved += fresh.nbytes
                state.use(self.call, tensor, write=True).copy_(fresh)

    def adopt(self, made: Any) -> Any:
        """Return a result of the CPU's kernel in memory of the device."""
        if not isinstance(made, Tensor):
            return made
        tensor = state.native.adopt(made)
        if made.numel():
            self.moved += made.nbytes
            state.use(self.call, tensor, write=True)
        return tensor


def _by_name(run: _Run, known: _Known, name: str, value: Any) -> Any:
    """Return an argument that was given by name as the CPU's kernel takes it."""
    if name == "device":
        return torch.device("cpu")
    if name in known.outputs:
        return run.out(value)
    return run.take(value, write=known.writes[known.arguments.index(name)])


def _result(
    run: _Run, known: _Known, made: Any, source: tuple[int, bool] | None, args: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Return a result as torch expects it: an argument itself, a view of one, or new memory of the device."""
    if source is not None:
        number, itself = source
        given = args[number] if number < len(args) else named.get(known.arguments[number])
        if itself:
            return given
        if isinstance(made, (list, tuple)):
            return [state.native.view_like(given, each) for each in made]
        return state.native.view_like(given, made)
    return [run.adopt(each) for each in made] if isinstance(made, (list, tuple)) else run.adopt(made)
