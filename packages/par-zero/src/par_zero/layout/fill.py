"""Materialization of parameters on the meta device. They stay the same objects, because optimizers hold them already.

The user's function fills one unit after the other. It may be any function that fills a full model, because it sees only
the tensors that are to be filled now:

    fill(blocks.0)   fill(blocks.1)   ...   fill(root)   without the units' tensors: the rest, and shared tensors

So every tensor is filled once, under its first name in that module, as in the full model.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from par_groups import original_name

from .._policies import InitFn
from .._torch_private import own_buffers, own_modules, own_parameters
from .units import owners, tensors_of


def make_real_(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor these values, with their memory, device and shape. The tensor stays the same object.

    Args:
        tensor: Tensor, such as a parameter on the meta device. It keeps its attributes.
        values: Values. The caller must not use this object afterwards.
    """
    made = values
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(values.detach(), requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    # The swap exchanges attributes as well, so `made` has got the tensor's attributes before.
    torch.utils.swap_tensors(tensor, made)


def device_of(module: nn.Module, device: torch.device | None) -> torch.device:
    """Return the device for tensors on the meta device: `device`, or that of the real tensors, or torch's default."""
    real = [tensor.device for _, tensor in tensors_of(module) if not tensor.is_meta]
    default = torch.get_default_device()
    return device or next(iter(real), torch.device("cpu") if default.type == "meta" else default)


class Filler:
    """Materializer of units, which calls the user's function.

    Args:
        root: Module that is sharded.
        units: Units, as lists of modules that run one after the other. The first unit is the rest of the root.
        init_fn: Function that is called with a module and the prefix of its names, such as "blocks.0.".

    Attributes:
        root: Module that is sharded.
        order: Numbers of the units in the order in which they are filled. The rest of the root is the last.
    """

    def __init__(self, root: nn.Module, units: Sequence[Sequence[nn.Module]], init_fn: InitFn) -> None:
        self.root, self._units, self._init_fn = root, units, init_fn
        self._owners = owners(root, units)
        self._names: dict[torch.Tensor, str] = {}
        for name, tensor in tensors_of(root):
            self._names.setdefault(tensor, name)
        self._prefixes = {module: original_name(f"{name}.") if name else "" for name, module in root.named_modules()}
        # The user's function may change shapes and dtypes, so the originals are kept for the check.
        self._abstract = {tensor: torch.empty_like(tensor, device="meta") for tensor in self._names}
        self._filled: set[torch.Tensor] = set()
        # The rest of the root contains tensors that several units share, so it follows all units.
        self.order = (*range(1, len(units)), 0)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was filled."""
        return parameter in self._filled

    def fill_(self, number: int) -> None:
        """Fill a unit, unless all of it is real.

        Args:
            number: Number of the unit.

        Raises:
            RuntimeError: The function left a tensor on the meta device, or changed its shape or dtype.
        """
        for module in self._units[number]:
            now = {tensor for _, tensor in tensors_of(module) if self._owners[tensor] == number} - self._filled
            if any(tensor.is_meta for tensor in now):
                with self._only(module, now):
                    self._init_fn(module, self._prefixes[module])
                for tensor, name in self._names.items():
                    if tensor in now:
                        self._check(tensor, name)
            # Tensors that were real before count as well, so that their chunks can be packed.
            self._filled |= now

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        before = self._abstract[tensor]
        if tensor.is_meta:
            raise RuntimeError(
                f"init_fn has left {name!r} on the meta device; it must initialize all parameters and "
                "buffers of the module that it gets"
            )
        if isinstance(tensor, nn.Parameter) and (tensor.shape, tensor.dtype) != (before.shape, before.dtype):
            raise RuntimeError(
                f"init_fn has made {name!r} {tensor.dtype} {tuple(tensor.shape)}, and it was {before.dtype} "
                f"{tuple(before.shape)} on the meta device; keep shapes and dtypes, or make the model in others"
            )

    @contextmanager
    def _only(self, module: nn.Module, now: Set[torch.Tensor]) -> Iterator[None]:
        """Reduce a module to the tensors that are to be filled now. On exit its parameters are the same objects again.

        Submodules without such a tensor are removed. All other tensors of the remaining submodules are replaced by
        abstract ones, which the function may fill in vain: some layers can only fill their weight and their bias
        together.
        """
        modules: list[tuple[dict[str, nn.Module | None], dict[str, nn.Module | None]]] = []
        places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        shown: dict[nn.Module, bool] = {}

        def reduce_(part: nn.Module) -> bool:
            # A submodule with several parents is reduced once, because its dictionaries are replaced in place.
            if part not in shown:
                children = own_modules(part)
                before = dict(children)
                kept = {name: child for name, child in before.items() if child is None or reduce_(child)}
                dictionaries: tuple[dict[str, Any], ...] = (own_parameters(part), own_buffers(part))
                own = [
                    (tensors, name, tensor)
                    for tensors in dictionaries
                    for name, tensor in tensors.items()
                    if tensor is not None
                ]
                shown[part] = any(kept.values()) or any(tensor in now for _, _, tensor in own)
                if shown[part]:
                    modules.append((children, before))
                    _replace_(children, kept)
                    places.extend(own)
                    for tensors, name, tensor in own:
                        if tensor not in now:
                            tensors[name] = self._stand_in(tensor)
            return shown[part]

        reduce_(module)
        made: dict[torch.Tensor, torch.Tensor | None] = {}
        try:
            yield
            for tensors, name, tensor in places:
                if tensor in now:
                    # A tied tensor has several names here. The first one counts, as in a full model.
                    made.setdefault(tensor, tensors.get(name))
        finally:
            # The user's module is restored even if the function raises an error.
            for children, before in modules:
                _replace_(children, before)
            for tensors, name, tensor in places:
                tensors[name] = tensor
        for tensor, values in made.items():
            if values is not None and values is not tensor and not values.is_meta:
                make_real_(tensor, values.detach())

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an abstract tensor like the original one."""
        # The stand-in has the tensor's attributes, because an initializer may read them, such as sharding metadata.
        abstract = torch.empty_like(self._abstract[tensor])
        made = nn.Parameter(abstract, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else abstract
        made.__dict__.update(tensor.__dict__)
        return made


def _replace_(children: dict[str, nn.Module | None], others: dict[str, nn.Module | None]) -> None:
    """Replace all items of `children` by the items of `others`, in the order of `others`."""
    children.clear()
    children.update(others)
