"""Freed parameters of stage 3: they show this rank's shard, and raise an error if code reads their full values.

A shard is flat. If code reads the parameter outside of a call of its module, the shard could broadcast or fit by
chance, and the result would be wrong. A freed parameter therefore has a subclass of nn.Parameter, which reports the
shape, the dtype and the device of the full parameter. It raises in every operation on values that it does not have.

The subclass costs nothing while a unit runs: the parameters of the unit are ordinary parameters then, for which torch
calls no Python code.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from par_groups import METADATA_OPERATIONS, GradientElsewhere, Sharding, set_sharding, sharding_of

from .._torch_private import chunk_of_dcp, item_of_dcp, without_torch_functions


@dataclass(eq=False, kw_only=True)
class Freed:
    """The metadata of a freed parameter.

    Args:
        name: Name of the parameter in the module.
        shape: Shape of the full parameter.
        start: Index of the first element that this rank stores, in the flattened parameter.
        settle: Function that is called before this rank's shard is written on the host of an accelerator, which may
            still copy it to the device.
        written: Function that is called when this rank's shard was written.
        on_host: This rank's shard on the host of an accelerator. None: it is the parameter's own memory.
    """

    name: str
    shape: torch.Size
    start: int
    settle: Callable[[], None]
    written: Callable[[], None]
    on_host: torch.Tensor | None = None


class Guarded(torch.Tensor):
    """The base class of freed parameters, and of their shards in a state dict."""

    par_freed: Freed

    @property
    def par_part(self) -> torch.Tensor:
        """This rank's shard, flat, as an ordinary tensor in the same memory."""
        with without_torch_functions():
            return self.detach()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operations that need only a shard, and raise for all other operations."""
        if func in _NOTES:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        answer = _ANSWERS.get(func)
        if answer is None or not isinstance(args[0], Guarded):
            # Another tensor is converted to the dtype and device of this one, which are known.
            if func in _CONVERSIONS:
                with without_torch_functions():
                    return func(*args, **(kwargs or {}))
            _refuse(func, args, kwargs)
        return answer(func, args, kwargs or {})

    # The same hash as torch's, without `__torch_function__`: sets of parameters are common, and must be quick.
    def __hash__(self) -> int:
        return id(self)

    # torch's own text would read values that are not in memory.
    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has a keyword
        freed = self.par_freed
        return f"{type(self).__name__}({freed.name!r}, shape={tuple(freed.shape)}, part={self.par_part.numel()})"

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.par_freed.name!r} is pickled or saved outside of summon, where stage 3 keeps a part of it on each "
            "rank; use par_checkpoint.save(), or save what state_dict() returns within par_zero.summon(module)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self, nn.Parameter):
            _refuse(torch.Tensor.__deepcopy__, [self], None)
        return memo.setdefault(id(self), _guard(self.par_part.clone(), self))

    # torch.distributed.checkpoint calls these methods of a sharded tensor.

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        return [item_of_dcp(name, box, self._record.shape, self.par_part) for box in self._record.boxes]

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk_of_dcp(box) for box in self._record.boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        box = next(box for box in self._record.boxes if torch.Size(box.start) == index.offset)
        return box.of(self.par_part)

    @property
    def _record(self) -> Sharding:
        return sharding_of(self)


class FreedParameter(Guarded, nn.Parameter):
    """A freed parameter: an ordinary parameter whose class was changed. `Chunk` changes it back with a gather."""

    @property
    def par_part(self) -> torch.Tensor:
        """This rank's shard, flat: the tensor on the host if the parameter is offloaded, otherwise its own memory."""
        return super().par_part if self.par_freed.on_host is None else self.par_freed.on_host


class FreedPart(Guarded):
    """The shard of a freed parameter that `detach()`, `data` and a state dict return."""


def _guard(part: torch.Tensor, like: Guarded) -> torch.Tensor:
    """Return a shard in other memory, or of another dtype, with the metadata of a freed parameter."""
    guarded: torch.Tensor = part.detach().as_subclass(FreedPart)
    guarded.par_freed = like.par_freed  # type: ignore[attr-defined]
    set_sharding(guarded, sharding_of(like))
    return guarded


def _refuse(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> NoReturn:
    """Raise an error that names the parameter, the operation and the fixes."""
    found = next(_guarded_in([*args, *(kwargs or {}).values()]))
    what = getattr(func, "__name__", str(func))
    # Attributes of tensors reach `__torch_function__` as methods of a descriptor, whose name is the attribute's.
    if what in ("__get__", "__set__"):
        what = f"an access to .{getattr(getattr(func, '__self__', None), '__name__', what)}"
    raise RuntimeError(
        f"{found.par_freed.name!r} is used by {what} outside of a call of its module, where stage 3 keeps a part of it "
        "on each rank; read and write it within par_zero.summon(module), use it in the forward of its own module, or "
        "pass units= to shard() that make one unit of that module and the one that reads it"
    )


def _guarded_in(values: Iterable[Any]) -> Any:
    for value in values:
        if isinstance(value, Guarded):
            yield value
        elif isinstance(value, list | tuple):
            yield from _guarded_in(value)


def _copied(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation that copies or views a freed parameter, and return its result as a guarded shard."""
    with without_torch_functions():
        made = func(*args, **kwargs)
        # Some operations, such as `to` of the same dtype, return the parameter itself, which callers may check by `is`.
        if made is args[0]:
            return made
        if isinstance(args[0], FreedParameter) and args[0].par_freed.on_host is not None:
            made = func(args[0].par_part, *args[1:], **kwargs)
    return _guard(made, args[0])


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run `copy_` from the same shard, or from a full tensor, from which this rank takes its shard."""
    target, source = args[0], args[1] if len(args) > 1 else kwargs.get("src")
    freed, mine = target.par_freed, target.par_part
    if isinstance(source, Guarded):
        if (source.par_freed.shape, source.par_freed.start) != (freed.shape, freed.start):
            _refuse(func, args, kwargs)
        source = source.par_part
        if source.shape != mine.shape:
            _refuse(func, args, kwargs)
    elif isinstance(source, torch.Tensor) and source.shape == freed.shape:
        source = source.detach().reshape(-1)[freed.start : freed.start + mine.numel()]
    else:
        _refuse(func, args, kwargs)
    if freed.on_host is not None:
        freed.settle()
    mine.copy_(source)
    freed.written()
    return target


def _set_data(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Accept an assignment of the same memory, such as in `module.to` of the same device and dtype. Raise otherwise."""
    if args[1] is not args[0] and not (
        isinstance(args[1], Guarded) and args[1].par_part.data_ptr() == args[0].par_part.data_ptr()
    ):
        _refuse(func, args, kwargs)


def _set_grad(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Accept an assignment of None or of a stand-in to the gradient. Raise for all other gradients."""
    if args[1] is not None and not isinstance(args[1], GradientElsewhere):
        refuse_by_hand(args[0].par_freed.name)
    with without_torch_functions():
        func(*args, **kwargs)


def refuse_by_hand(name: str) -> NoReturn:
    """Raise an error about a gradient that the caller has assigned to a parameter.

    Args:
        name: Name of the parameter in the module.
    """
    raise RuntimeError(
        f"{name!r} was given a gradient by hand, and the optimizer steps what backward passes sum over the ranks; use "
        "torch.autograd.backward(parameters, gradients) instead, or write in place through "
        "par_groups.gradients(optimizer)"
    )


def _size(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    shape = args[0].par_freed.shape
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _of_shape(answer: Callable[[torch.Size], Any], _: Any, args: Sequence[Any], __: dict[str, Any]) -> Any:
    return answer(args[0].par_freed.shape)


def _stride(_: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    strides = torch.empty(args[0].par_freed.shape, device="meta").stride()
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return strides if dim is None else strides[dim]


def _nbytes(_: Any, args: Sequence[Any], __: dict[str, Any]) -> int:
    return int(args[0].par_freed.shape.numel() * args[0].element_size())


_T = torch.Tensor

_NOTES: frozenset[Any] = METADATA_OPERATIONS | frozenset(
    (
        *(_T.is_contiguous, _T.untyped_storage, _T.storage_offset, _T.is_pinned, _T.is_shared),
        *(_T.register_hook, _T.register_post_accumulate_grad_hook),
        *(torch.autograd.grad, torch.autograd.backward, _T.backward),
    )
)
"""Operations on a parameter that neither read nor write its values."""

_CONVERSIONS: frozenset[Any] = frozenset([_T.to, _T.type_as])

_ANSWERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        [
            *(_T.detach, torch.detach, _T.data.__get__, _T.clone, torch.clone, _T.contiguous),  # type: ignore[attr-defined]
            *(_T.to, _T.cpu, _T.cuda, _T.float, _T.double, _T.half, _T.bfloat16, _T.pin_memory),
        ],
        _copied,
    ),
    _T.copy_: _written,
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    _T.grad.__set__: _set_grad,  # type: ignore[union-attr]
    _T.size: _size,
    _T.stride: _stride,
    _T.nbytes.__get__: _nbytes,  # type: ignore[attr-defined]
    _T.shape.__get__: partial(_of_shape, torch.Size),  # type: ignore[attr-defined]
    **dict.fromkeys([_T.ndim.__get__, _T.dim], partial(_of_shape, len)),  # type: ignore[attr-defined]
    **dict.fromkeys([_T.numel, _T.nelement, torch.numel], partial(_of_shape, torch.Size.numel)),
    _T.__len__: partial(_of_shape, lambda shape: shape[0]),
}
"""Operations that need only a shard, and the functions that run them."""
