"""The tensors of a model: their names in memory and in the files, and how each of them is cut."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from par_groups import Segment, Sharding, original_name, sharding_of

from .._torch_private import local_of as memory_of
from ..format.pickled import is_extra_state
from .conversion import Conversion, split

Model = nn.Module | Mapping[str, torch.Tensor]
Names = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]
LayoutNames = tuple[list[str], list[str]]


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Content of a model's state dict.

    Args:
        tensors: Parameters and buffers by name, not copied; tied tensors once.
        tied: Name in `tensors` for each other name of a tied tensor.
        objects: Extra state of modules by name, which is not a tensor.
    """

    tensors: Mapping[str, torch.Tensor]
    tied: Mapping[str, str]
    objects: Mapping[str, object]

    @property
    def names(self) -> list[str]:
        """All names of tensors, those of tied ones included."""
        return [*self.tensors, *self.tied]


def model_state(model: Model) -> ModelState:
    """Return the state of a module, of a module in DistributedDataParallel or torch.compile, or of a plain mapping.

    If several names share one tensor, the first name in the state dict's order is kept.

    Raises:
        ValueError: The elements of a tensor cannot be read from memory, see `check_plain`; or two names are equal
            without the prefixes of torch.compile.
        TypeError: A name is not a text, or a mapping contains nested tensors.
    """
    # `keep_vars` returns the parameters themselves, with their sharding metadata.
    state = model.state_dict(keep_vars=True) if isinstance(model := unwrapped(model), nn.Module) else model
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    objects: dict[str, object] = {}
    first: dict[object, str] = {}
    for raw, value in state.items():
        name = _checked_name(raw)
        if name in tensors or name in tied or name in objects:
            raise ValueError(
                f"model has {raw!r} and another name that is {name!r} without wrappers; rename one of them"
            )
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            if isinstance(model, Mapping) and not is_extra_state(name) and _holds_tensors(value):
                raise TypeError(
                    f"model[{raw!r}] is a {type(value).__name__} that holds tensors; pass one flat mapping of tensors "
                    "as the model, the optimizer itself, and the rest as `extra`"
                )
            objects[name] = value
            continue
        check_plain(name, value)
        # A tensor with several names is stored once, under its first name, as in Transformers.
        stored = first.setdefault(_identity(value), name)
        if stored == name:
            tensors[name] = value
        else:
            tied[name] = stored
    return ModelState(tensors=tensors, tied=tied, objects=objects)


def _checked_name(raw: object) -> str:
    """Return a name in a state dict without the prefixes of wrappers."""
    if not isinstance(raw, str):
        raise TypeError(f"model has the key {raw!r}, a {type(raw).__name__}; use texts as names, such as {str(raw)!r}")
    return original_name(raw)


def _holds_tensors(value: object) -> bool:
    """Return whether a value of a mapping contains tensors, such as a nested state dict."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    return any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in inner)


def copied(model: nn.Module, found: ModelState) -> list[str]:
    """Return the names of tensors that a hook of the state dict creates at each call.

    To fill them has no effect on the model.

    Args:
        model: The module.
        found: Content of its state dict.
    """
    own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if _has_memory(local_of(tensor))}
    strange = [name for name, tensor in found.tensors.items() if tensor.numel() and storage_of(tensor) not in own]
    # A tensor that has another storage at the next call was created by a hook for this call.
    again = model_state(model).tensors if strange else {}
    return [name for name in strange if storage_of(again[name]) != storage_of(found.tensors[name])]


def unwrapped(model: Model) -> Model:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def named_parameters(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the names and parameters of a model, tied parameters under their first name."""
    inner = unwrapped(model)
    pairs = inner.named_parameters() if isinstance(inner, nn.Module) else inner.items()
    return ((original_name(name), parameter) for name, parameter in pairs)


def rename(names: Names | None, keys: Iterable[str]) -> dict[str, str]:
    """Return the name in the files of each name in the model.

    Args:
        names: A mapping of model names: names that it lacks do not change, and its other names, such as those of
            another pipeline stage, are ignored. Or pairs of a regular expression and its replacement, applied one after
            the other. Or a function of the model's name.
        keys: Names in the model.

    Raises:
        ValueError: A regular expression is invalid, or two tensors would share one name.
        TypeError: `names` has none of these types.
    """
    keys = tuple(keys)
    renamed = _renamed(names, keys)
    first: dict[str, str] = {}
    for key, name in renamed.items():
        other = first.setdefault(name, key)
        if other != key:
            raise ValueError(
                f"names maps both {other!r} and {key!r} to {name!r}; each tensor needs a name of its own in the files"
            )
    return renamed


def _renamed(names: object, keys: Sequence[str]) -> dict[str, str]:
    """Return the name in the files of each key; two names may still be equal."""
    if names is None:
        return {key: key for key in keys}
    if isinstance(names, Mapping):
        return {key: _text(names[key], f"names[{key!r}]") if key in names else key for key in keys}
    if callable(names):
        return {key: _text(names(key), f"names({key!r})") for key in keys}
    if isinstance(names, Sequence) and not isinstance(names, str | bytes):
        return _by_expressions(names, keys)
    raise TypeError(f"names is {names!r}; give a dict, pairs of (regular expression, replacement), or a function")


def _by_expressions(names: Sequence[object], keys: Sequence[str]) -> dict[str, str]:
    """Return the keys after all replacements of regular expressions."""
    renamed = {key: key for key in keys}
    for pair in names:
        if not (isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2):
            raise TypeError(f"names has {pair!r}; each item is a pair of a regular expression and its replacement")
        pattern, replacement = (_text(text, f"{pair!r} in names") for text in pair)
        try:
            expression = re.compile(pattern)
            renamed = {key: expression.sub(replacement, name) for key, name in renamed.items()}
        except re.error as error:
            raise ValueError(f"{pair!r} in names is not a regular expression and its replacement: {error}") from None
    return renamed


def _text(value: object, what: str) -> str:
    """Return a name after a check that it is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{what} is {value!r}; names are strings")
    return value


def sharding_in(name: str, tensor: torch.Tensor, layout: Mapping[str, Sharding]) -> Sharding:
    """Return the sharding of a tensor: from `layout`, else from its sharding metadata.

    Raises:
        ValueError: The sharding cannot be saved, such as a DTensor with a Partial placement; or boxes of the layout
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


def segments_on_disk(name: str, sharding: Sharding, convert: Conversion | None, key: str) -> list[Segment]:
    """Return the tensors on disk that hold a tensor in memory: one under its name there, or the parts from `convert`.

    Args:
        name: Name of the tensor in the model.
        sharding: Sharding of the tensor in memory.
        convert: Function from a tensor's name and global shape to its parts, or None.
        key: Name of the tensor in the files, if it is not converted.
    """
    parts = None if convert is None else convert(name, tuple(sharding.shape))
    return [Segment(key, sharding)] if parts is None else split(sharding, parts)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, outside of autograd."""
    return memory_of(tensor).detach()


def layout_names(layout: Mapping[str, Sharding] | None, model: Model | None) -> LayoutNames:
    """Return the names of a layout that this rank's model lacks, and the names that it has."""
    if not layout:
        return [], []
    known = set(model_state({} if model is None else model).names)
    return sorted(set(layout) - known), sorted(set(layout) & known)


def check_layout(of_ranks: Sequence[LayoutNames]) -> None:
    """Raise unless some rank's model has each name of a layout.

    Args:
        of_ranks: Return value of `layout_names` on each rank.

    Raises:
        ValueError: No rank has a name; the message contains it.
    """
    unknown = {name for lacking, _ in of_ranks for name in lacking}
    # With a pipeline, each rank has only some names of a common layout.
    unknown -= {name for _, having in of_ranks for name in having}
    if unknown:
        raise ValueError(f"layout names {min(unknown)!r}, but the model has no such tensor; correct or remove it")


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Check that the elements of a tensor lie in memory as they are.

    Raises:
        ValueError: A sparse, quantized or lazily conjugated tensor, one whose memory was freed, or one of a class that
            keeps its data elsewhere.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} is of a lazy module that has no shape yet; run a forward pass first")
    local = memory_of(tensor)
    what = ""
    if local.is_nested:
        what = "is a nested tensor; pass its values and its offsets, or pad it"
    elif local.is_quantized:
        what = "is a quantized tensor; give its int_repr(), q_scale() and q_zero_point()"
    elif local.layout != torch.strided:
        what = f"has the layout {local.layout}; give it dense"
    elif local.is_conj() or local.is_neg():
        what = "is conjugated or negated lazily; call .resolve_conj().resolve_neg()"
    elif not _has_memory(local):
        what = f"is a {type(local).__name__}, which keeps its data in other tensors; give those, or its plain values"
    elif local.numel() and not local.is_meta and not local.untyped_storage().nbytes():
        what = "has no memory, which was freed, as by reshard(release=True); pass the object that has the values"
    if what:
        raise ValueError(f"{name!r} {what}")


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own; a tensor that wraps other tensors has none."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def storage_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that share a storage."""
    local = local_of(tensor)
    return id(tensor) if local.device.type == "meta" else local.untyped_storage().data_ptr()


def _identity(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tied tensors, which have the same elements of one storage."""
    local = memory_of(tensor)
    # These tensors have no memory of their own, and their addresses are all equal.
    if local.device.type == "meta" or local.numel() == 0:
        return id(tensor)
    return local.untyped_storage().data_ptr(), local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def device_for(device: str | torch.device | None, model: Model | None) -> torch.device:
    """Return the device on which tensors of the meta device are allocated.

    Args:
        device: Device from the caller. None: this rank's device in the model's device mesh, or the CPU without a mesh.
        model: Model; some of its tensors may be DTensors.
    """
    if device is not None:
        return torch.device(device)
    tensors = {} if model is None else model_state(model).tensors
    mesh = next((tensor.device_mesh for tensor in tensors.values() if hasattr(tensor, "device_mesh")), None)
    # A rank of a device mesh has one device. Without a mesh, only the caller could name the device.
    if mesh is None or mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def materialise_(tensor: torch.Tensor, device: torch.device) -> None:
    """Give memory to a tensor on the meta device; it stays the same object, so references to it stay valid."""
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    # Optimizers and tied modules hold this object, so the new tensor takes its identity.
    torch.utils.swap_tensors(tensor, made)
