"""Torch style: one file for each of model, optimizer, scheduler and extra, which `torch.load(weights_only=True)` opens.

The rank that writes a file gathers its tensors in memory, as blocks of a file that is never written, and streams them
out with `torch.save`.
"""

import io
import pickle
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, cast

import torch
from crc32c import crc32c

from par_groups import bytes_of

from .format.manifest import BLOCK, OBJECTS, FileRecord
from .format.tagged import decode
from .plan.claims import name_of
from .plan.plan import Prepared
from .state.collect import Content
from .storage.files import Writer
from .transfer.errors import attempt
from .transfer.snapshot import Snapshot
from .transfer.write import WriteContext, write_blocks


def write_objects(
    prepared: Prepared, work: WriteContext, content: Content, snapshot: Snapshot | None = None
) -> dict[str, FileRecord]:
    """Gather the tensors of each file on one rank and write the file there. Collective.

    Args:
        prepared: Plan of the save. Its files are one for the model's tensors and one for the optimizer's tensors.
        work: Context of the write.
        content: Content that this rank passes to the save.
        snapshot: Copy of the local tensors to gather from. None gathers from these tensors directly. Default: None.

    Returns:
        Manifest records by file name; the same on every rank.
    """
    memory = _MemoryStaging(prepared)
    gathering = replace(work, staging=memory, progress=_nothing)  # type: ignore[arg-type]
    _, error = write_blocks(prepared.plan, gathering, snapshot)
    work.ranks.raise_first(error)
    records, error = attempt(lambda: _write_all(prepared, work, content, memory))
    work.ranks.raise_first(error)
    # Few ranks write a file. All others have the same empty value, which `distinct` sends once and not for each rank.
    return {name: record for _, of_rank in work.ranks.distinct(records or {}) for name, record in of_rank.items()}


def _write_all(
    prepared: Prepared, work: WriteContext, content: Content, memory: "_MemoryStaging"
) -> dict[str, FileRecord]:
    """Write the files of which this rank is the writer."""
    objects: dict[str, Any] = {}
    for number, file in enumerate(prepared.files):
        if (prepared.owners or [])[number] == work.ranks.rank:
            tensors = memory.tensors(number)
            objects[file.section] = (
                _model(tensors, content) if file.section == "model" else _optimizer(tensors, content)
            )
    if work.ranks.rank == 0:
        state = content.state
        if state.groups is not None and not any(file.section == "optimizer" for file in prepared.files):
            objects["optimizer"] = _optimizer({}, content)  # it has not stepped yet
        if state.parts["model"] is not None and not any(file.section == "model" for file in prepared.files):
            objects["model"] = _model({}, content)  # it has no tensors
        for section in ("scheduler", "extra"):
            if state.parts[section] is not None:
                objects[section] = decode(state.parts[section], state.tensors)
    return {OBJECTS[section]: _write(work, OBJECTS[section], value) for section, value in objects.items()}


def _model(tensors: Mapping[str, torch.Tensor], content: Content) -> dict[str, object]:
    """Return the state dict of a model; tied names share memory in the file as well."""
    extra = decode(content.state.parts["model"], content.state.tensors) if content.state.parts["model"] else {}
    tied = {name: tensors[stored] for name, stored in content.tied.items()}
    return {**tensors, **tied, **(extra if isinstance(extra, dict) else {})}


def _optimizer(tensors: Mapping[str, torch.Tensor], content: Content) -> dict[str, object]:
    """Return the state dict of an optimizer, with names of parameters in place of numbers."""
    state: dict[str, Any] = {}
    slots = {key: decode(slot, content.state.tensors) for key, slot in content.state.slots.items()}
    for key, value in {**tensors, **slots}.items():
        name, dot, slot = key.rpartition(".")
        # A key without a dot belongs to no parameter.
        (state.setdefault(name, {}) if dot else state)[slot] = value
    groups = []
    for names, options in content.state.groups or ():
        decoded = decode(options, content.state.tensors)
        groups.append({**(decoded if isinstance(decoded, dict) else {}), "params": list(names)})
    own: dict[str, object] = {}
    for entries in [] if content.state.own is None else decode(content.state.own, content.state.tensors):  # type: ignore[attr-defined]
        own.update(entries)
    return {**own, "state": state, "param_groups": groups}


def check_loadable(content: Content) -> None:
    """Check that `torch.load` would open the files of model and optimizer, from which they are loaded again.

    Raises:
        TypeError: A value that it refuses, for its class could run code.
    """
    # Tensors can always be loaded, and ties would look for them, so neither takes part in the check.
    for section, value in (("model", _model({}, replace(content, tied={}))), ("optimizer", _optimizer({}, content))):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        try:
            torch.load(file, weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise TypeError(
                f"style='torch': the state of the {section} holds a value of {found[1] if found else 'a class'}, which "
                "torch.load(weights_only=True) refuses; pass style='huggingface', or numbers, texts and tensors instead"
            ) from error


def _write(work: WriteContext, name: str, value: object) -> FileRecord:
    """Streams an object into the staging folder."""
    writer = work.staging.writer(name)
    stream = _ChecksumStream(writer)
    try:
        torch.save(value, cast("IO[bytes]", stream))
    except BaseException:
        writer.abort()
        # The error of the stream names the cause, which the error that torch.save raises does not.
        if stream.error is not None:  # such as that the disk is full
            raise stream.error from None
        raise
    writer.finish()
    return stream.record()


class _ChecksumStream(io.RawIOBase):
    """A file to write to from beginning to end, which checksums what passes.

    Args:
        writer: Writes into the staging folder.

    Attributes:
        error: The first error of the writer, for torch tells only that writing failed.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._size, self._crcs = writer, 0, [0]
        self.error: OSError | None = None

    def writable(self) -> bool:
        """Return True, as torch requires."""
        return True

    def write(self, data: Any) -> int:
        """Appends some bytes; the number of them."""
        memory = memoryview(data).cast("B")
        try:
            self._writer.write_at(self._size, memory)
        except OSError as error:
            self.error = self.error or error
            raise
        done = 0
        while done < len(memory):
            if self._size and self._size % BLOCK == 0:
                self._crcs.append(0)
            # torch writes pieces of any size, and checksums are of full blocks.
            part = memory[done : done + BLOCK - self._size % BLOCK]
            self._crcs[-1] = crc32c(part, self._crcs[-1])
            self._size += len(part)
            done += len(part)
        return len(memory)

    def record(self) -> FileRecord:
        """Return the manifest's record of the file."""
        return FileRecord(size=self._size, data_begin=0, header_crc=0, block=BLOCK, crcs=tuple(self._crcs))


class _MemoryStaging:
    """A staging folder in the memory of the rank that writes a file: there a file is its tensors, one by one.

    Args:
        prepared: All tensors and files.
    """

    positional = True

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._tensors: dict[int, torch.Tensor] = {}

    def writer(self, name: str) -> Writer:
        """Return a writer for a file that accepts writes at any position."""
        file = next(file for file in self._prepared.files if file.name == name)
        return _MemoryWriter([(begin, bytes_of(self._tensor(number).view(-1))) for number, begin, _ in file.placed])

    def tensors(self, file: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a file by name, in the order of the model."""
        numbers = sorted(number for number, _, _ in self._prepared.files[file].placed)
        return {name_of(self._prepared.tensors[number].key): self._tensor(number) for number in numbers}

    def _tensor(self, number: int) -> torch.Tensor:
        """Return the memory of a tensor, which the first call allocates."""
        tensor = self._prepared.tensors[number]
        if number not in self._tensors:
            self._tensors[number] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return self._tensors[number]


class _MemoryWriter:
    """Writes into the tensors of a file.

    Args:
        parts: First byte and memory of each tensor, by first byte.
    """

    def __init__(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._parts = parts
        self._firsts = [first for first, _ in parts]

    def write_at(self, begin: int, view: memoryview) -> None:
        """Deals the bytes out to the tensors that they belong to."""
        reached, end = bisect_right(self._firsts, begin), bisect_left(self._firsts, begin + len(view))
        # The bytes may begin inside the tensor that begins before them.
        for first, memory in self._parts[max(reached - 1, 0) : end]:
            low, high = max(first, begin), min(first + len(memory), begin + len(view))
            if low < high:
                memory[low - first : high - first] = view[low - begin : high - begin]

    def finish(self) -> None:
        """Do nothing: the data is complete in memory."""

    def abort(self) -> None:
        """Do nothing: there is no file to remove."""


def _nothing(_: int) -> None:
    """Ignore progress; it is shown when bytes reach the disk."""
