"""Looking into a checkpoint: what it holds, and parts of single tensors."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch

from par_groups import Box

from ..format.bytes import bytes_of
from ..plan.coverage import row_major
from ..storage.directory import Place
from ..storage.found import Found, look, tensors_of
from ..storage.storage import Folder, Source, open_folder
from ..storage.unmixed import unmixed

Path = str | PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds.

    Args:
        path: Its folder.
        style: "huggingface" or "torch"; "foreign" if it was not saved here.
        step: What `save` was given.
        tensors: dtype, shape and file of the model's tensors by name.
        optimizer: The same of the optimizer's, by "<parameter>.<slot>".
        tied: Names that are not stored, and the stored one.
        files: Bytes by file.
        groups: The optimizer's param groups: names, and options.
        scheduler: Its state, or a list of states.
        extra: What `save` was given as `extra`.
    """

    path: str
    style: str
    step: int | None
    tensors: Mapping[str, Place]
    optimizer: Mapping[str, Place]
    tied: Mapping[str, str]
    files: Mapping[str, int]
    groups: tuple[tuple[list[str], dict[str, Any]], ...]
    scheduler: Any
    extra: Any

    @property
    def parameters(self) -> int:
        """Elements of the model's tensors."""
        return sum(math.prod(place.shape) for place in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.files.values())


def inspect(path: Path) -> Contents:
    """What a checkpoint holds, without its tensors' data. No process group is needed.

    Args:
        path: Its folder, ours or any Hugging Face folder.

    Raises:
        CheckpointError: There is none.
        CorruptError: Headers, index or manifest are not what was written.
        ReplacedError: It was replaced while it was read, again and again.
    """
    folder = open_folder(path)
    return unmixed(folder, partial(_contents, folder))


def _contents(folder: Folder) -> Contents:
    found = look(folder)
    manifest = found.manifest
    return Contents(
        path=folder.url,
        style="foreign" if manifest is None else manifest.style,
        step=None if manifest is None else manifest.step,
        tensors=found.places("model"),
        optimizer=found.places("optimizer"),
        tied=found.tied,
        files=folder.sizes(),
        groups=tuple(found.groups()),
        scheduler=found.part("scheduler"),
        extra=found.part("extra"),
    )


def read(path: Path, name: str, box: Box | None = None) -> torch.Tensor:
    """One tensor, or a rectangle of it; only its bytes are read, and checksums are not looked at.

    Args:
        path: A checkpoint's folder.
        name: Of the tensor; of an optimizer's, "<parameter>.<slot>".
        box: The rectangle, by its `start` and `size`; None reads the whole tensor.

    Returns:
        A CPU tensor of the box's size.

    Raises:
        KeyError: There is no such tensor.
        ValueError: A box that leaves the tensor.
        ReplacedError: It was replaced while it was read, again and again.
    """
    folder = open_folder(path)
    return unmixed(folder, lambda: read_found(folder, look(folder), name, box))


def reader_of(folder: Folder, found: Found) -> Callable[[str], torch.Tensor]:
    """What reads one whole tensor after the other of a checkpoint that was looked at; a pickle is opened once."""
    mapped = {name: tensor for files in found.pickled.values() for name, tensor in tensors_of(folder, files).items()}
    return lambda name: mapped[name].clone() if name in mapped else read_found(folder, found, name)


def read_found(folder: Folder, found: Found, name: str, box: Box | None = None) -> torch.Tensor:
    """The same as `read`, of a checkpoint that was looked at."""
    section = next((each for each in ("model", "optimizer") if name in found.places(each)), None)
    if section is None:
        stored = found.tied.get(name)
        if stored is None:
            raise KeyError(f"{folder.url!r} has no tensor {name!r}; inspect() lists what it has")
        section, name = "model", stored
    place = found.places(section)[name]
    start, size = ((0,) * len(place.shape), place.shape) if box is None else (box.start, box.size)
    if len(start) != len(place.shape) or any(a + n > m for a, n, m in zip(start, size, place.shape, strict=True)):
        raise ValueError(f"the box at {start} of size {size} leaves {name!r}, which has shape {place.shape}")
    if section in found.pickled:
        index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        return tensors_of(folder, found.pickled[section])[name][index].clone()
    tensor = torch.empty(size, dtype=place.dtype, device="cpu")
    with closing(folder.open(place.file)) as source:
        _read_box(source, place, start, tensor)
    return tensor


def _read_box(source: Source, place: Place, start: tuple[int, ...], into: torch.Tensor) -> None:
    """Fills a contiguous tensor, run by run of bytes that lie together in the file."""
    if into.numel() == 0:
        return
    memory, position = bytes_of(into), 0
    for first, count in runs(place.shape, start, tuple(into.shape)):
        begin, size = place.begin + first * place.dtype.itemsize, count * place.dtype.itemsize
        source.read_into(begin, memory[position : position + size])
        position += size


def runs(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First element and length of each run of a rectangle that is contiguous in the whole tensor, in order."""
    dim = len(shape)
    while dim > 0 and size[dim - 1] == shape[dim - 1]:
        dim -= 1  # dims that are whole belong to one run
    outer = max(dim - 1, 0)
    count = math.prod(size[outer:])
    strides = row_major(shape)
    base = sum(i * stride for i, stride in zip(start, strides, strict=True))
    for number in range(math.prod(size[:outer])):
        first, rest = base, number
        for d in reversed(range(outer)):
            rest, index = divmod(rest, size[d])
            first += index * strides[d]
        yield first, count
