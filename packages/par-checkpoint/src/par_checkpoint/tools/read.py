"""`read_tensor`: one tensor of a checkpoint, or a rectangle of it."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from os import PathLike

import torch

from par_groups import Box, bytes_of

from ..plan.coverage import row_major
from ..storage.consistent import read_consistently
from ..storage.folder import Folder
from ..storage.outline import Outline, read_outline, tensors_of
from ..tiers.gathered import open_checkpoint


def read_tensor(
    path: str | PathLike[str] | Sequence[str | PathLike[str]], name: str, box: Box | None = None
) -> torch.Tensor:
    """Read one tensor, or a rectangle of it. Only its bytes are read, and checksums are not looked at.

    Args:
        path: The checkpoint's folder, or its URL; or the folders of hosts that hold its parts (see `copies` of `save`),
            one or several.
        name: The tensor's name; for a tensor of the optimizer "<parameter>.<slot>".
        box: The rectangle, of which `start` and `size` count; None reads the whole tensor.

    Returns:
        A CPU tensor of the box's size.

    Raises:
        KeyError: There is no such tensor.
        ValueError: A box that leaves the tensor; several folders of which none holds parts.
        CheckpointError: There is no checkpoint, or its parts in these folders lack some of the elements.
        ReplacedError: Other checkpoints took its place again and again while it was read.
    """
    folder = open_checkpoint(path)
    return read_consistently(folder, lambda: _read(folder, read_outline(folder), name, box))


def reader_of(folder: Folder, outline: Outline) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a full tensor by name; files of torch.save are opened once."""
    mapped = {name: tensor for files in outline.pickled.values() for name, tensor in tensors_of(folder, files).items()}
    return lambda name: mapped[name].clone() if name in mapped else _read(folder, outline, name, None)


def _read(folder: Folder, outline: Outline, name: str, box: Box | None) -> torch.Tensor:
    section = next((section for section in ("model", "optimizer") if name in outline.places(section)), None)
    if section is None:
        if name not in outline.tied:
            raise KeyError(f"{folder.url!r} has no tensor {name!r}; inspect() lists what it has")
        section, name = "model", outline.tied[name]
    place = outline.places(section)[name]
    start, size = ((0,) * len(place.shape), place.shape) if box is None else (box.start, box.size)
    if len(start) != len(place.shape) or any(a + n > m for a, n, m in zip(start, size, place.shape, strict=True)):
        raise ValueError(f"the box at {start} of size {size} leaves {name!r}, which has shape {place.shape}")
    if section in outline.pickled:
        index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        return tensors_of(folder, outline.pickled[section])[name][index].clone()
    tensor = torch.empty(size, dtype=place.dtype, device="cpu")
    if tensor.numel():
        memory, position, width = bytes_of(tensor), 0, place.dtype.itemsize
        with closing(folder.open(place.file)) as source:
            for first, count in runs(place.shape, start, tuple(size)):
                end = position + count * width
                source.read_into(place.begin + first * width, memory[position:end])
                position = end
    return tensor


def runs(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the row-major runs of a tensor that make up a rectangle of it.

    Args:
        shape: The tensor's shape.
        start: The rectangle's first index in each dim.
        size: The rectangle's length in each dim; none is 0.

    Returns:
        First element and number of elements of each stretch, in order.
    """
    dim = len(shape)
    while dim > 0 and size[dim - 1] == shape[dim - 1]:
        dim -= 1  # dims that are whole belong to one stretch
    outer = max(dim - 1, 0)
    count = math.prod(size[outer:])
    strides = row_major(shape)
    base = sum(i * stride for i, stride in zip(start, strides, strict=True))
    for number in range(math.prod(size[:outer])):
        first, rest = base, number
        # The number of a run has the indices on the outer dims as its digits.
        for d in reversed(range(outer)):
            rest, index = divmod(rest, size[d])
            first += index * strides[d]
        yield first, count
