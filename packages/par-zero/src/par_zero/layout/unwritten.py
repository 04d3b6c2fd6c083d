"""Parameters and buffers that have no values yet: a forward before they are loaded raises an error."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from par_groups import on_written

from .units import tensors_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Unwritten:
    """Tensors of a module that were on the meta device and must be written before it runs.

    A tensor counts as written when `par_groups.written_` or a `load_state_dict` names it. This object removes its hooks
    when all tensors are written; after a `load_state_dict`, it does so in the next forward.

    Args:
        module: Sharded module.
        tensors: Parameters and buffers that have memory, but no values. Tensors on the meta device have no values
            either.
        reset: Function that ends a forward which raises the error.
    """

    def __init__(self, module: nn.Module, tensors: Iterable[torch.Tensor], reset: Callable[[], None]) -> None:
        self._module, self._tensors, self._reset = module, set(tensors), reset
        self._registration = on_written(self._tensors, self._written)
        self._hooks: list[RemovableHandle] = []
        # A forward or a load may begin at any submodule, so each of them has hooks.
        for part in module.modules():
            self._hooks.append(part.register_forward_pre_hook(torch.compiler.disable(self._refuse)))
            self._hooks.append(part.register_load_state_dict_post_hook(self._loaded))

    def _written(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors -= set(tensors)
        if self._first() is None:
            self._end()

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        """Note that a state dict was loaded into a part of the module, perhaps as a part of something larger."""
        # A load of a larger module names the missing keys with a longer prefix, so the ends of the names decide.
        missing = tuple(f".{key}" for key in keys.missing_keys)
        found = [tensor for name, tensor in tensors_of(module) if not any(key.endswith(f".{name}") for key in missing)]
        # The hooks stay for now, because torch is iterating over them.
        self._tensors -= set(found)

    def _first(self) -> str | None:
        """Return the name of the first tensor without values."""
        names = (name for name, tensor in tensors_of(self._module) if tensor.is_meta or tensor in self._tensors)
        return next(names, None)

    def _end(self) -> None:
        self._registration.remove()
        for hook in self._hooks:
            hook.remove()

    def _refuse(self, *_: Any) -> None:
        name = self._first()
        if name is None:
            self._end()
            return
        self._reset()
        raise RuntimeError(
            f"{name!r} has no values yet, as it was on the meta device and shard() got no init_fn; load a "
            "checkpoint first, as by par_checkpoint.load(path, model=module), or write it, and say so with "
            "par_groups.written_(module.parameters())"
        )
