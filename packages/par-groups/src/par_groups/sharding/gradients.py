"""Where gradients, masters and state live, and word of what is read and written from outside the optimizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .._torch_private import is_called_by_state_dict_of_dcp
from ..attributes import GRADIENT_ELSEWHERE
from .segments import segments_of
from .sharding import Box

Written = Callable[[Sequence[torch.Tensor]], None]
"""A callback of `on_written`: called with those of its tensors that were written."""

Settle = Callable[[Sequence[torch.Tensor]], None]
"""A callback of `on_settle`: called with those of its tensors that are about to be read."""

_WRITTEN, _SETTLE = "par_registrations", "par_settled_by"
"""The attributes of a tensor that hold its registrations."""


def gradients(
    source: torch.optim.Optimizer | torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Name, box and view of every gradient, wherever it lives.

    The view has the box's shape and shares memory with the gradient, so writing to it changes what the optimizer sees.
    A tensor without a gradient is passed over. Names are those of a flat tensor's segments; else those that the
    optimizer was given (`Optimizer(model.named_parameters())`); else "param_groups.0.params.1".

    Args:
        source: An optimizer, a module, or named tensors.

    Raises:
        RuntimeError: A module's parameter whose gradient lives elsewhere (see `set_gradient_elsewhere`): the module's
            own `.grad` would be absent or partly filled.
    """
    for name, tensor in _named(source):
        elsewhere = GRADIENT_ELSEWHERE.of(tensor)
        if elsewhere is not None:
            raise RuntimeError(f"the gradient of {name!r} lives in {elsewhere}; ask that one's optimizer for gradients")
        if tensor.grad is not None:
            yield from segments_of(tensor, name).views(_local(tensor.grad))


def _named(
    source: torch.optim.Optimizer | torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(source, torch.nn.Module):
        return source.named_parameters()
    if isinstance(source, torch.optim.Optimizer):
        return _named_in_groups(source)
    return source


def _named_in_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"param_groups.{g}.params.{i}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that this rank holds; a DTensor keeps it inside."""
    to_local = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()


def set_gradient_elsewhere(parameter: torch.Tensor, where: str) -> None:
    """Marks a parameter whose gradient must be read elsewhere.

    Args:
        parameter: A module's parameter, of which an optimizer holds a flat shard instead.
        where: Words for the error that whoever reads its `.grad` gets, such as "the flat shard of unit 'layers.3'".
    """
    GRADIENT_ELSEWHERE.set(parameter, where)


class Registration:
    """A callback that waits for word of some tensors; `remove()` ends it."""

    def __init__(self, tensors: Iterable[torch.Tensor], callback: Written, attribute: str = _WRITTEN) -> None:
        self._tensors, self._attribute = tuple(tensors), attribute
        self.callback = callback
        for tensor in self._tensors:
            if not hasattr(tensor, attribute):
                setattr(tensor, attribute, [])
            getattr(tensor, attribute).append(self)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """A copy of a tensor is nobody's concern: what is copied or pickled with it calls nobody."""
        return Registration, ((), _nobody, self._attribute)

    def remove(self) -> None:
        """Ends the registration; a second call does nothing."""
        for tensor in self._tensors:
            getattr(tensor, self._attribute).remove(self)
        self._tensors = ()


def _nobody(_: Sequence[torch.Tensor]) -> None:
    """What a copied registration calls."""


def on_written(tensors: Iterable[torch.Tensor], callback: Written) -> Registration:
    """Asks for word of tensors that are written from outside the optimizer.

    Args:
        tensors: The tensors whose copies the caller keeps, such as the parameters of fp32 masters.
        callback: Called by `written_`, with those of `tensors` that were written.

    Returns:
        The registration; its `remove()` ends it.
    """
    return Registration(tensors, callback)


def written_(tensors: Iterable[torch.Tensor]) -> None:
    """Tells whoever holds copies that these tensors were written from outside the optimizer.

    To be called after a checkpoint was loaded or weights were operated on: without it, old fp32 masters would overwrite
    the new weights at the next step. Each registered callback is called once.

    Args:
        tensors: What was written.
    """
    _call(tensors, _WRITTEN)


@torch.no_grad()
def follow_written_(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Takes over into a copy what a program has written to the tensor that is the copy's rounding.

    An element of the tensor that is not what the copy's element rounds to was written, and so the copy's element
    becomes it. All other elements of the copy keep their digits. No wait for a device.

    Args:
        copy: The copy, of more digits, such as an fp32 master.
        tensor: The tensor, of the same shape.
    """
    if copy.is_cpu and _has_same_bits(copy.detach(), tensor.detach()):
        return
    copy.copy_(torch.where(copy.to(tensor.dtype) == tensor, copy, tensor.to(copy.dtype)))


_BLOCK = 1 << 17
"""Number of elements that a CPU rounds at a time, so that they stay in its cache."""


def _has_same_bits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a copy rounds to a tensor, on a CPU. Whole words are compared, since halves take thirty times as long."""
    if not (copy.is_contiguous() and tensor.is_contiguous()):
        return torch.equal(copy.to(tensor.dtype), tensor)
    for exact, written in zip(copy.view(-1).split(_BLOCK), tensor.view(-1).split(_BLOCK), strict=True):
        rounded = exact.to(tensor.dtype)
        fits = rounded.nbytes % 8 == 0 and written.data_ptr() % 8 == 0
        word = torch.int64 if fits else torch.uint8
        if not torch.equal(rounded.view(word), written.view(word)):
            return False
    return True


def refuse_get_state_dict(optimizer: torch.optim.Optimizer) -> None:
    """Raise an error if torch.distributed.checkpoint reads or sets the state of an optimizer by parameter names.

    Call it when an optimizer that holds other tensors than the module's parameters returns its state or state dict.
    torch would end in a KeyError there that names a number.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: torch.distributed.checkpoint is the caller.
    """
    if is_called_by_state_dict_of_dcp():
        raise ValueError(
            "get_state_dict() and set_state_dict() of torch.distributed.checkpoint look for the tensors of the "
            f"{type(optimizer).__name__} among the module's parameters, and it holds other tensors; use "
            "par_checkpoint.save and load(path, model=module, optimizer=optimizer), or get_model_state_dict(), "
            "set_model_state_dict() and the state_dict() of each rank's optimizer"
        )


def on_settle(tensors: Iterable[torch.Tensor], callback: Settle) -> Registration:
    """Asks for word before tensors of an optimizer, or their state, are read or written from outside.

    Args:
        tensors: The optimizer's tensors on which the caller has work under way, such as state that is on its way to a
            disk.
        callback: Called by `settle_`, with those of `tensors` that are meant. It ends that work.

    Returns:
        The registration; its `remove()` ends it.
    """
    return Registration(tensors, callback, _SETTLE)


def settle_(tensors: Iterable[torch.Tensor]) -> None:
    """Has work end that is still under way on an optimizer's tensors and their state.

    To be called before these are read or written from outside the optimizer's step, such as by a checkpoint: the
    reading twin of `written_`. Each registered callback is called once. No communication.

    Args:
        tensors: The tensors in the optimizer's `param_groups`.
    """
    _call(tensors, _SETTLE)


def _call(tensors: Iterable[torch.Tensor], attribute: str) -> None:
    """Calls back, once, whoever has registered for some tensors."""
    called: dict[Registration, list[torch.Tensor]] = {}
    for tensor in tensors:
        registrations: Sequence[Registration] = getattr(tensor, attribute, ())
        for registration in registrations:
            called.setdefault(registration, []).append(tensor)
    for registration, meant in called.items():
        registration.callback(meant)
