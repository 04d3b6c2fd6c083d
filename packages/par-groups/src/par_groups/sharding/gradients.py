"""Views of gradients, and callbacks for reads and writes of an optimizer's tensors from outside the optimizer."""

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
    """Yield name, box and view of every gradient.

    The view has the box's shape and shares memory with the gradient, so that a write to it changes the gradient of the
    optimizer. Tensors without a gradient are skipped. Names are taken from a flat tensor's segments, else from the
    optimizer's arguments (`Optimizer(model.named_parameters())`), else they have the form "param_groups.0.params.1".

    Args:
        source: Optimizer, module, or named tensors.

    Raises:
        RuntimeError: The gradient of a module's parameter is stored in another tensor (see `set_gradient_elsewhere`).
            The module's own `.grad` would be absent or incomplete.
    """
    for name, tensor in _named(source):
        elsewhere = GRADIENT_ELSEWHERE.of(tensor)
        if elsewhere is not None:
            raise RuntimeError(f"the gradient of {name!r} lives in {elsewhere}; ask that one's optimizer for gradients")
        if tensor.grad is not None:
            # A check of the type would import DTensor, for which a program without one need not pay.
            to_local = getattr(tensor.grad, "to_local", None)
            yield from segments_of(tensor, name).views(tensor.grad if to_local is None else to_local())


def _named(
    source: torch.optim.Optimizer | torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(source, torch.optim.Optimizer):
        yield from source.named_parameters() if isinstance(source, torch.nn.Module) else source
        return
    for g, group in enumerate(source.param_groups):
        # torch keeps names only if the optimizer was given named parameters; otherwise their places identify them.
        names = group.get("param_names") or [f"param_groups.{g}.params.{i}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)


def set_gradient_elsewhere(parameter: torch.Tensor, where: str) -> None:
    """Mark a parameter whose gradient is stored in another tensor.

    Args:
        parameter: Parameter of a module; the optimizer holds a flat shard instead.
        where: Name of the other tensor in the error of `gradients`, such as "the flat shard of unit 'layers.3'".
    """
    GRADIENT_ELSEWHERE.set(parameter, where)


class Registration:
    """Registration of a callback for reads or writes of some tensors; `remove()` ends it."""

    def __init__(self, tensors: Iterable[torch.Tensor], callback: Written, attribute: str = _WRITTEN) -> None:
        self._tensors, self._attribute = tuple(tensors), attribute
        self.callback = callback
        for tensor in self._tensors:
            # The registrations are on the tensor, so that they end with it. A table by tensor would keep it alive.
            if not hasattr(tensor, attribute):
                setattr(tensor, attribute, [])
            getattr(tensor, attribute).append(self)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        """Copy and pickle a registration without its tensors and callback: it applies to the original tensors only."""
        return Registration, ((), _nobody, self._attribute)

    def remove(self) -> None:
        """End the registration; a second call does nothing."""
        for tensor in self._tensors:
            getattr(tensor, self._attribute).remove(self)
        self._tensors = ()


def _nobody(_: Sequence[torch.Tensor]) -> None:
    """Do nothing: the callback of a copied registration."""


def on_written(tensors: Iterable[torch.Tensor], callback: Written) -> Registration:
    """Register a callback for tensors that are written from outside the optimizer.

    Args:
        tensors: Tensors of which the caller holds copies, such as the parameters of fp32 masters.
        callback: Function that `written_` calls with the written tensors among `tensors`.

    Returns:
        The registration; its `remove()` ends it.
    """
    return Registration(tensors, callback)


def written_(tensors: Iterable[torch.Tensor]) -> None:
    """Report that these tensors were written from outside the optimizer to every object that keeps a copy of them.

    Call this function after you load a checkpoint or change weights. Otherwise the next step overwrites the new weights
    with the old fp32 masters. Each registered callback is called once.

    Args:
        tensors: Written tensors.
    """
    _call(tensors, _WRITTEN)


@torch.no_grad()
def follow_written_(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Update a copy of higher precision with the elements that a program has written to a tensor.

    The tensor is the copy's rounding. If an element differs from the rounded element of the copy, a program has written
    it, and the copy takes its value. All other elements of the copy keep their precision. The host does not wait for a
    device.

    Args:
        copy: Copy of higher precision, such as an fp32 master.
        tensor: Tensor of the same shape.
    """
    # Usually nothing was written, which a CPU finds out faster than it writes the copy. On a GPU, the host would have
    # to wait for the answer.
    if copy.is_cpu and _has_same_bits(copy.detach(), tensor.detach()):
        return
    copy.copy_(torch.where(copy.to(tensor.dtype) == tensor, copy, tensor.to(copy.dtype)))


_BLOCK = 1 << 17
"""Number of elements that a CPU rounds at a time, so that they stay in its cache."""


def _has_same_bits(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a copy rounds to a tensor, on a CPU."""
    # 64-bit words are compared, because a comparison of 16-bit elements takes thirty times as long.
    if not (copy.is_contiguous() and tensor.is_contiguous()):
        return torch.equal(copy.to(tensor.dtype), tensor)
    for exact, written in zip(copy.view(-1).split(_BLOCK), tensor.view(-1).split(_BLOCK), strict=True):
        rounded = exact.to(tensor.dtype)
        # A view as 64-bit words needs complete words at an aligned address; a slice of a flat buffer may have neither.
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
    """Register a callback before an optimizer's tensors, or their state, are read or written from outside.

    Args:
        tensors: Tensors of the optimizer on which the caller has work in flight, such as a write of state to a disk.
        callback: Function that `settle_` calls with the affected tensors among `tensors`. It must end the work.

    Returns:
        The registration; its `remove()` ends it.
    """
    return Registration(tensors, callback, _SETTLE)


def settle_(tensors: Iterable[torch.Tensor]) -> None:
    """End all work in flight on an optimizer's tensors and their state.

    Call this function before code outside the optimizer's step, such as a checkpoint, reads or writes them; `written_`
    is its counterpart after a write. Each registered callback is called once. No communication.

    Args:
        tensors: Tensors in the optimizer's `param_groups`.
    """
    _call(tensors, _SETTLE)


def _call(tensors: Iterable[torch.Tensor], attribute: str) -> None:
    """Call each callback that is registered for some of the tensors once."""
    # One callback may be registered for several of the tensors, and receives them in one call.
    called: dict[Registration, list[torch.Tensor]] = {}
    for tensor in tensors:
        registrations: Sequence[Registration] = getattr(tensor, attribute, ())
        for registration in registrations:
            called.setdefault(registration, []).append(tensor)
    for registration, meant in called.items():
        registration.callback(meant)
