"""The tensors of a model by name, as they are in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from par_groups import Sharding, sharding_of

from ..format.pickled import is_extra_state

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile and activation checkpointing rename


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """What a model's state dict holds.

    Args:
        tensors: By name, tied ones once; the very parameters and buffers, not copies.
        tied: The names that are not among them, and the name of the tensor they share.
        objects: What is not a tensor: extra state of modules.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    objects: Mapping[str, object]


def model_state(model: nn.Module | Mapping[str, torch.Tensor]) -> ModelState:
    """The state of a module, of what DistributedDataParallel or torch.compile wraps, or of a plain mapping.

    Of names that share one tensor, the first in the state dict's order is kept.

    Raises:
        ValueError: A tensor whose elements cannot be read from memory, see `check_plain`.
    """
    state = model.state_dict(keep_vars=True) if isinstance(model := unwrapped(model), nn.Module) else model
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    objects: dict[str, object] = {}
    first: dict[object, str] = {}
    for raw, value in state.items():
        name = clean(raw)
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            objects[name] = value
            continue
        check_plain(name, value)
        stored = first.setdefault(_identity(value), name)
        if stored == name:
            tensors[name] = value
        else:
            tied[name] = stored
    return ModelState(tensors=tensors, tied=tied, objects=objects)


def copied(model: nn.Module, found: ModelState) -> list[str]:
    """The names of tensors that a hook of the state dict makes anew each time: filling them would not change the model.

    Args:
        model: The module.
        found: Its state.
    """
    held = {_memory(each) for each in (*model.parameters(), *model.buffers()) if _has_memory(local_of(each))}
    strange = [name for name, each in found.tensors.items() if each.numel() and _memory(each) not in held]
    again = model_state(model).tensors if strange else {}
    return [name for name in strange if _memory(again[name]) != _memory(found.tensors[name])]


def unwrapped(model: nn.Module | Mapping[str, torch.Tensor]) -> nn.Module | Mapping[str, torch.Tensor]:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def clean(name: str) -> str:
    """A parameter's name without what wrappers inside the model add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters, tied ones under their first name."""
    inner = unwrapped(model)
    pairs = inner.named_parameters() if isinstance(inner, nn.Module) else inner.items()
    return ((clean(name), each) for name, each in pairs)


def sharding_in(name: str, tensor: torch.Tensor, layout: Mapping[str, Sharding]) -> Sharding:
    """How a tensor is cut: as `layout` says, else as its record says.

    Raises:
        ValueError: A record that cannot be saved, such as a DTensor with a Partial placement; or a layout whose boxes
            leave the local tensor.
    """
    if name not in layout:
        try:
            return sharding_of(tensor)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    sharding, local = layout[name], local_of(tensor)
    if any(box.last >= local.numel() for box in sharding.boxes):
        raise ValueError(
            f"layout[{name!r}] has boxes that leave the local tensor of shape {tuple(local.shape)}; give ones within it"
        )
    return sharding


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank, outside of autograd; a DTensor keeps it inside."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Checks that the elements of a tensor lie in memory as they are.

    Raises:
        ValueError: A sparse or lazily conjugated tensor, or one of a class that keeps its data elsewhere.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    what = ""
    if local.layout != torch.strided:
        what = f"has the layout {local.layout}; give it dense"
    elif local.is_conj() or local.is_neg():
        what = "is conjugated or negated lazily; call .resolve_conj().resolve_neg()"
    elif not _has_memory(local):
        what = f"is a {type(local).__name__}, which keeps its data in other tensors; give those, or its plain values"
    if what:
        raise ValueError(f"{name!r} {what}")


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor subclass that only wraps others
        return False
    return True


def _memory(tensor: torch.Tensor) -> object:
    local = local_of(tensor)
    return id(tensor) if local.device.type == "meta" else local.untyped_storage().data_ptr()


def _identity(tensor: torch.Tensor) -> object:
    local = getattr(tensor, "_local_tensor", tensor)
    if local.device.type == "meta" or local.numel() == 0:
        return id(tensor)
    return local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def materialise_(tensor: torch.Tensor, device: torch.device) -> None:
    """Gives memory to a tensor on the meta device; it stays the same object, so whoever holds it holds it still."""
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)
