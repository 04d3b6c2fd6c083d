"""Buffers that no file holds, such as the frequencies of rotary positions: made anew in a model from the meta device.

A buffer that is not persistent is a function of the model's config, which its module computes when it is made. On the
meta device it has computed nothing. So a load has it computed again: by the module's own `reset_buffers()`, or, in a
model of transformers, by `_init_weights`, which `from_pretrained` calls for the same purpose.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from par_groups import attributes, original_name

from .._errors import CheckpointError
from .._torch_private import buffers_of, non_persistent_buffers, version_of
from .model import Model, materialise_, unwrapped
from .transformers import is_pretrained, pretrained_of

_MARK = "_is_hf_initialized"
"""The attribute of a tensor whose values transformers leaves as they are."""


@dataclass(frozen=True, kw_only=True)
class MetaBuffer:
    """Buffer on the meta device that is not in the state dict.

    Args:
        name: Name in the model.
        module: Module that holds the buffer.
        key: Name in the module.
        maker: Innermost model of transformers that contains the module. None: there is none, or its `_init_weights`
            does not write to the buffer.
    """

    name: str
    module: nn.Module
    key: str
    maker: Any

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer as it is now."""
        return buffers_of(self.module)[self.key]

    def was_written(self, before: torch.Tensor, version: int) -> bool:
        """Return whether the buffer was replaced by another tensor, or written to since it had this version."""
        now = self.tensor
        return now is not before or version_of(before) != version

    @property
    def can_be_made(self) -> bool:
        """Whether anybody is known to compute it."""
        return self.is_own or self.maker is not None

    @property
    def is_own(self) -> bool:
        """Whether its module computes it itself."""
        return callable(getattr(self.module, "reset_buffers", None))

    def compute_(self) -> None:
        """Has all buffers of its module computed."""
        if self.is_own:
            self.module.reset_buffers()  # type: ignore[operator]
        else:
            self.maker._init_weights(self.module)

    @property
    def computed_by(self) -> str:
        """The method that computes it."""
        if self.is_own:
            return f"{type(self.module).__name__}.reset_buffers()"
        return f"{type(self.maker).__name__}._init_weights()"

    def text(self) -> str:
        """Return the error about a buffer that no code computes."""
        return (
            f"{self.name!r} is a buffer on the meta device that no file holds: give its {type(self.module).__name__} a "
            "method reset_buffers() that computes it, or make the model's buffers on a real device"
        )


def meta_buffers(model: Model | None) -> list[MetaBuffer]:
    """Return the buffers of a module that a load must compute, in the order of its modules."""
    inner = None if model is None else unwrapped(model)
    if not isinstance(inner, nn.Module):
        return []
    found = list(_meta_buffers(inner, "", attributes.PRETRAINED.of(inner), set()))
    idle = _left_by_transformers(inner, [buffer for buffer in found if not buffer.is_own and buffer.maker is not None])
    # Without a maker, a load refuses the buffer before anything has changed.
    return [replace(buffer, maker=None) if buffer.name in idle else buffer for buffer in found]


def _meta_buffers(module: nn.Module, prefix: str, maker: Any, seen: set[int]) -> Iterator[MetaBuffer]:
    """Yield the buffers of a module and of the modules in it, each module once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    # Before its release 5 transformers did not keep filled parameters from being drawn anew.
    if is_pretrained(module) and "transformers.initialization" in sys.modules:
        maker = module
    own = buffers_of(module)
    for key in sorted(non_persistent_buffers(module)):
        buffer = own.get(key)
        if buffer is not None and buffer.is_meta:
            yield MetaBuffer(name=original_name(prefix + key), module=module, key=key, maker=maker)
    for name, child in module.named_children():
        yield from _meta_buffers(child, f"{prefix}{name}.", maker, seen)


def _left_by_transformers(model: nn.Module, buffers: Sequence[MetaBuffer]) -> set[str]:
    """Return the names of buffers that `_init_weights` does not write to, by a trial on tensors without values."""
    if not buffers:
        return set()
    before = {buffer.name: (tensor, version_of(tensor)) for buffer in buffers if (tensor := buffer.tensor) is not None}
    failed = set()
    with _left_alone(model, buffers):
        # One call computes all buffers of a module.
        for module in {id(buffer.module): buffer for buffer in buffers}.values():
            try:
                module.compute_()
            except RuntimeError:  # it reads values, which there are none of; it is asked again when there are
                failed.add(id(module.module))
    return {
        buffer.name
        for buffer in buffers
        if id(buffer.module) not in failed and not buffer.was_written(*before[buffer.name])
    }


def tie_(model: Model | None) -> None:
    """Ties what a model of transformers says is tied, while it is on the meta device.

    Release 5.0 leaves such a model untied there. Part of a model, such as a pipeline stage, may lack one of two tied
    tensors; it does not change then.
    """
    pretrained = pretrained_of(model)
    keys: Any = {} if pretrained is None else getattr(pretrained, "all_tied_weights_keys", None) or {}
    tensors = {} if not keys else dict(_named_tensors(pretrained))
    pairs = [(tensors.get(target), tensors.get(source)) for target, source in keys.items()]
    if any(one is None for pair in pairs for one in pair) or not any(target is not source for target, source in pairs):
        return
    if all(tensor.is_meta for pair in pairs for tensor in pair):  # type: ignore[union-attr]
        pretrained.tie_weights()


def make_buffers_(model: Model | None, buffers: Sequence[MetaBuffer], device: torch.device) -> None:
    """Allocate and compute buffers; nothing else in the model changes.

    Args:
        model: Filled model that holds the buffers.
        buffers: Buffers that can be computed.
        device: Device of the new buffers. They are computed on the CPU, as in transformers.

    Raises:
        CheckpointError: A module did not write to one of its buffers.
    """
    inner = None if model is None else unwrapped(model)
    if not isinstance(inner, nn.Module) or not buffers:
        return
    before = {}
    for buffer in buffers:
        tensor = buffer.tensor
        if tensor is not None:
            if tensor.is_meta:  # one that is in two places is made once
                materialise_(tensor, device)
            before[buffer.name] = tensor, version_of(tensor)
    with _left_alone(inner, buffers):
        for module in {id(buffer.module): buffer for buffer in buffers}.values():
            module.compute_()
    for buffer in buffers:
        if buffer.tensor is None or buffer.tensor.is_meta or not buffer.was_written(*before[buffer.name]):
            raise CheckpointError(
                f"{buffer.name!r} got no values from {buffer.computed_by}, and no file holds it, so the model that was "
                f"loaded cannot be used; let {type(buffer.module).__name__}.reset_buffers() compute it, or make the "
                "model's buffers on a real device"
            )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@contextmanager
def _left_alone(model: nn.Module, buffers: Sequence[MetaBuffer]) -> Iterator[None]:
    """Compute buffers on the CPU inside the context, and prevent transformers from initializing other tensors."""
    computed = {id(buffer.tensor) for buffer in buffers}
    kept = [tensor for _, tensor in _named_tensors(model) if id(tensor) not in computed]
    initialization = sys.modules.get("transformers.initialization")
    guard: AbstractContextManager[None] = nullcontext()
    if initialization is not None:
        guard = initialization.guard_torch_init_functions()
    # `_init_weights` draws every tensor anew that lacks this mark.
    marked = [tensor for tensor in kept if not hasattr(tensor, _MARK)]
    for tensor in marked:
        setattr(tensor, _MARK, True)
    try:
        with torch.no_grad(), torch.device("cpu"), guard:
            yield
    finally:
        for tensor in marked:
            if hasattr(tensor, _MARK):
                delattr(tensor, _MARK)
