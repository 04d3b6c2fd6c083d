"""Where gradients and masters live: every gradient of an optimizer, and word of parameters written from outside."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from .segments import segments_of
from .sharding import Box

Written = Callable[[Sequence[torch.Tensor]], None]
"""A callback of `on_written`: called with those of its tensors that were written."""


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
        elsewhere = getattr(tensor, "par_gradient_elsewhere", None)
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
    parameter.par_gradient_elsewhere = where  # type: ignore[attr-defined]  # a tensor takes attributes


class Registration:
    """A callback that waits for `written_`; `remove()` ends it."""

    def __init__(self, tensors: Iterable[torch.Tensor], callback: Written) -> None:
        self._tensors = tuple(tensors)
        self.callback = callback
        for tensor in self._tensors:
            if not hasattr(tensor, "par_registrations"):
                tensor.par_registrations = []  # type: ignore[attr-defined]  # a tensor takes attributes
            tensor.par_registrations.append(self)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Ends the registration; a second call does nothing."""
        for tensor in self._tensors:
            tensor.par_registrations.remove(self)  # type: ignore[attr-defined]
        self._tensors = ()


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
    called: dict[Registration, list[torch.Tensor]] = {}
    for tensor in tensors:
        registrations: Sequence[Registration] = getattr(tensor, "par_registrations", ())
        for registration in registrations:
            called.setdefault(registration, []).append(tensor)
    for registration, written in called.items():
        registration.callback(written)
