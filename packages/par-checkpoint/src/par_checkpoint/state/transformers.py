"""Files of transformers' own models: their conversion mapping, as parts.

Transformers packs tensors as it loads them (the experts of Mixtral, say) and takes them apart as it saves. Here its own
code for saving runs on tensors without data that only note where their elements come from. So nothing about a model
family is written here, and what that code does beyond placement is refused, tensor by tensor.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from par_groups import attributes, original_name

from .conversion import Conversion, Shape, TensorSlice
from .model import Model, unwrapped

_CONVERTS_SINCE = 5
"""The first release of transformers that packs and takes apart tensors on their way from and to files."""


def pretrained_of(model: Model | None) -> Any:
    """Return the Transformers model that a model is, is a part of, or wraps; None if there is none."""
    inner = None if model is None else unwrapped(model)
    inner = attributes.PRETRAINED.of(inner) or inner
    return inner if isinstance(inner, nn.Module) and is_pretrained(inner) else None


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a Transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def conversion_of(model: Model | None, shapes: Mapping[str, Shape]) -> Conversion | None:
    """Return the conversion that `save_pretrained` would apply to a model's tensors, including renames.

    Args:
        model: Any module, perhaps within wrappers such as DistributedDataParallel; a mapping of tensors has none.
        shapes: Name and global shape of each of the model's tensors, tied ones once. Only these can be asked for.

    Returns:
        Return a function from a name to its slices, or None if transformers does not convert the model. It raises
        ValueError when it is asked for a tensor that is converted by more than placement.

    Raises:
        ValueError: A conversion that transformers cannot reverse, such as a quantised model's.
    """
    inner = pretrained_of(model)
    if inner is None:
        return None
    transforms = _conversions(inner)
    if not transforms:
        return None
    parts, refused = _traced_parts(_reversed(transforms), shapes, inner.config)

    def convert(key: str, shape: Shape) -> Sequence[TensorSlice] | None:
        if key in refused:
            operations, cause = refused[key]
            raise ValueError(
                f"transformers converts {key!r} by {operations}, which does more than move elements; pass a "
                "`convert` function of your own that returns None for it, to keep it as it is in memory"
            ) from cause
        if key not in parts:
            raise ValueError(
                f"transformers' conversion of the {len(shapes)} tensors that were given leaves no place in the files "
                f"for {key!r}; pass a `convert` function of your own"
            )
        return None if _as_it_is(key, shape, parts[key]) else parts[key]

    return convert


def _conversions(model: Any) -> list[Any]:
    """Return the conversions with which the model was loaded, else those of its class, like `save_pretrained`."""
    loaded_with = getattr(model, "_weight_conversions", None)
    # Files that are saved again should look like the files from which the model was loaded.
    if loaded_with is not None:
        return list(loaded_with)
    version = sys.modules["transformers"].__version__
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        conversions_of = mapping.get_model_conversion_mapping
    except (ImportError, AttributeError) as error:
        # Releases without conversions write the tensors as they are in memory.
        if int(version.partition(".")[0]) < _CONVERTS_SINCE:
            return []
        raise ValueError(
            f"transformers {version} does not tell how it converts a model between memory and files ({error}): install "
            "a later par-checkpoint, which may know where that has moved, or an earlier transformers; or pass a "
            "`convert` function of your own, such as one that returns None to keep tensors as they are in memory"
        ) from error
    prefix_change = getattr(mapping, "PrefixChange", ())  # not in every release
    root = SimpleNamespace(
        named_modules=lambda: _declared(model),
        modules=lambda: (module for _, module in _declared(model)),  # releases up to 5.4 or so go by these
        config=model.config,
        base_model_prefix=model.base_model_prefix,
    )
    # Renamings of a prefix are left out: no files were loaded that had the prefix.
    return [one for one in conversions_of(root, add_legacy=False) if not isinstance(one, prefix_change)]


def _declared(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with the classes from source code: FSDP replaces a class by one with another name."""
    for name, module in model.named_modules():
        # FSDP puts a class of its own, with another name, in front of the original class.
        bases = [base for base in type(module).__mro__ if issubclass(base, nn.Module)]  # without FSDP's own mix-in
        kind = next(base for base in bases if getattr(sys.modules.get(base.__module__), base.__name__, None) is base)
        if kind is not type(module) and hasattr(module, "config"):
            stand_in = kind.__new__(kind)  # only its class and its config are looked at
            stand_in.__dict__["config"] = module.config
            module = stand_in  # noqa: PLW2901
        yield original_name(name), module


def _reversed(transforms: Sequence[Any]) -> list[Any]:
    """Return the transforms from memory to the files, in the order in which they apply."""
    try:
        # The inverse of a sequence of steps has the inverse steps in the opposite order.
        return [transform.reverse_transform() for transform in reversed(transforms)]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"transformers cannot reverse its conversion of this model ({error}); pass a `convert` function of your own"
        ) from error


def _as_it_is(key: str, shape: Shape, parts: Sequence[TensorSlice]) -> bool:
    """Return whether the parts are only the tensor itself, under its own name."""
    if [part.name for part in parts] != [key]:
        return False
    part = parts[0]
    return part.shape == part.extent == tuple(shape) and part.dims == tuple(range(len(shape)))


HeldRun = dict[str, list[TensorSlice]]
Refused = dict[str, tuple[str, Exception]]


def _traced_parts(transforms: Sequence[Any], shapes: Mapping[str, Shape], config: Any) -> tuple[HeldRun, Refused]:
    """Return the parts of each tensor by name in the model.

    Or the operations that change values, and the errors in them.
    """
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    groups, single = _grouped([transform for transform in transforms if hasattr(transform, "operations")], shapes)
    traced = {_renamed(key, renamings): _Traced.of(key, shapes[key]) for key in single}
    # An operation may look up the shape of a parameter: it must see the global one.
    model = SimpleNamespace(get_parameter=lambda name: SimpleNamespace(shape=shapes[name]))
    refused: Refused = {}
    for name, (keys, converter) in groups.items():
        try:
            # The conversion runs on traces in place of tensors, so it shows where each element goes without any data.
            results = converter.convert(name, model=model, config=config)
        except Exception as error:  # whatever an operation does to a tensor without data, it may fail in any way
            refused.update((key, (str(converter.operations), error)) for key in keys)
            continue
        for target, result in results.items():
            traced[_renamed(target, renamings)] = result[0] if isinstance(result, list) else result
    parts: HeldRun = {}
    for name, tensor in traced.items():
        for piece in tensor.pieces:
            part = TensorSlice(
                name=name, shape=tensor.shape, start=piece.start, dims=piece.dims, offset=piece.offset, size=piece.size
            )
            parts.setdefault(piece.key, []).append(part)
    return parts, refused


def _grouped(
    converters: Sequence[Any], shapes: Mapping[str, Shape]
) -> tuple[dict[str, tuple[list[str], Any]], list[str]]:
    """Group the keys by the converter that collects them; return the groups, and the keys without a converter."""
    # Experts are stacked in this order, in which expert 10 follows expert 9.
    order = importlib.import_module("transformers.core_model_loading").dot_natural_key
    groups: dict[str, tuple[list[str], Any]] = {}
    single = []
    for key in sorted(shapes, key=order):
        for converter in converters:
            name, pattern = converter.rename_source_key(key)
            if pattern is not None:
                keys, collector = groups.setdefault(name, ([], copy.deepcopy(converter)))
                keys.append(key)
                collector.add_tensor(name, key, pattern, _Traced.of(key, shapes[key]))
                break
        else:
            single.append(key)
    return groups, single


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    """Return a name after all renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


class _TracedPiece(NamedTuple):
    """A rectangle of a traced tensor, and the place of its elements in the model, with the fields of `TensorSlice`."""

    key: str
    start: Shape
    dims: Shape
    offset: Shape
    size: Shape


@dataclass(frozen=True)
class _Traced:
    """A tensor without data that knows which elements of the model's tensors it is made of.

    It has what placement needs of a tensor's methods; everything else fails.
    """

    shape: Shape
    pieces: tuple[_TracedPiece, ...]

    @classmethod
    def of(cls, key: str, shape: Shape) -> "_Traced":
        """Return the trace of a tensor of the model."""
        origin = (0,) * len(shape)
        return cls(tuple(shape), (_TracedPiece(key, origin, tuple(range(len(shape))), origin, tuple(shape)),))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        placements: dict[Any, Callable[..., Any]] = {torch.chunk: _chunk, torch.cat: _cat, torch.transpose: _transpose}
        if function not in placements:
            # An operation that computes values cannot be expressed as a placement of elements.
            raise TypeError(f"torch.{getattr(function, '__name__', function)} is not known to be placement only")
        return placements[function](*args, **kwargs or {})

    def size(self, dim: int) -> int:
        """Return the length of a dim, like a tensor's method."""
        return self.shape[dim]

    def contiguous(self) -> "_Traced":
        """Return the tensor itself: a trace has no memory order."""
        return self

    def squeeze(self, dim: int | None = None) -> "_Traced":
        """Return the tensor without a dim of length 1, or without all such dims, like `torch.Tensor.squeeze`."""
        asked = range(len(self.shape)) if dim is None else (dim % len(self.shape),)
        return self._select([d for d, length in enumerate(self.shape) if length != 1 or d not in asked])

    def _select(self, dims: Sequence[int]) -> "_Traced":
        """Take these dims, in this order; those that are left out have extent 1."""

        def take(numbers: Shape) -> Shape:
            return tuple(numbers[dim] for dim in dims)

        pieces = (
            piece._replace(dims=take(piece.dims), offset=take(piece.offset), size=take(piece.size))
            for piece in self.pieces
        )
        return _Traced(take(self.shape), tuple(pieces))


def _transpose(tensor: _Traced, dim0: int, dim1: int) -> _Traced:
    """Trace `torch.transpose`."""
    dims = list(range(len(tensor.shape)))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return tensor._select(dims)


def _chunk(tensor: _Traced, chunks: int, dim: int = 0) -> tuple[_Traced, ...]:
    """Trace `torch.chunk`."""
    length = tensor.shape[dim]
    # As in torch, the last chunk may be smaller.
    step = -(-length // chunks)
    return tuple(
        _narrow(tensor, dim % len(tensor.shape), low, min(step, length - low)) for low in range(0, length, step)
    )


def _narrow(tensor: _Traced, dim: int, start: int, length: int) -> _Traced:
    """Trace `torch.narrow`."""
    pieces = []
    for piece in tensor.pieces:
        low, high = max(start, piece.offset[dim]), min(start + length, piece.offset[dim] + piece.size[dim])
        if low < high:
            inside = piece.dims[dim]
            pieces.append(
                piece._replace(
                    start=_with(piece.start, inside, piece.start[inside] + low - piece.offset[dim]),
                    offset=_with(piece.offset, dim, low - start),
                    size=_with(piece.size, dim, high - low),
                )
            )
    return _Traced(_with(tensor.shape, dim, length), tuple(pieces))


def _cat(tensors: Sequence[_Traced], dim: int = 0) -> _Traced:
    """Trace `torch.cat` for several tensors."""
    dim %= len(tensors[0].shape)
    if len({_with(tensor.shape, dim, 0) for tensor in tensors}) > 1:
        shapes = [tensor.shape for tensor in tensors]
        raise ValueError(f"tensors of shapes {shapes} cannot be joined along dim {dim}; their other dims must be alike")
    pieces: list[_TracedPiece] = []
    length = 0
    for tensor in tensors:
        pieces += (
            piece._replace(offset=_with(piece.offset, dim, piece.offset[dim] + length)) for piece in tensor.pieces
        )
        length += tensor.shape[dim]
    return _Traced(_with(tensors[0].shape, dim, length), tuple(pieces))


def _with(numbers: Shape, index: int, value: int) -> Shape:
    """Return numbers with another value at one index."""
    return (*numbers[:index], value, *numbers[index + 1 :])
