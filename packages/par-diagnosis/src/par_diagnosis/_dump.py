"""Dumps of single ranks, as records and as files. This module needs no torch."""

import dataclasses
import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from par_groups import Communicator, Operation, call_sites, read_flight_trace

_FORMAT = 1
_RANK_FILE = re.compile(r"rank-(\d+)\.json")
_FATAL_FILE = re.compile(r"rank-(\d+)\.fatal")
_TORCH_FILE = re.compile(r"(?:trace|fr|flight|debug)\w*?_?(?:rank_?)?(\d+)(?:\.pickle|\.pkl)?", re.IGNORECASE)
_FATAL_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True, kw_only=True)
class StackFrame:
    """One frame of a Python stack.

    Args:
        site: File and line, such as "package/module.py:88".
        function: Name of the function.
        code: Text of the line; "" if the source is missing.
        is_library: Whether the file belongs to torch, to Python or to par-diagnosis.
    """

    site: str
    function: str
    code: str = ""
    is_library: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """State of a rank at one moment: its stack, its collectives and its progress.

    Args:
        rank: Global rank.
        world: Number of ranks.
        host: Name of the machine.
        pid: Process identifier.
        time: Time of the dump, in seconds since 1970.
        reason: Reason for the dump: "no progress for 300 s", "SIGQUIT", "error", or the reason of another rank.
        step: Number of finished steps; None if the program has not reported it.
        phase: Phase of the program, such as "data"; "" if the program has not reported it.
        seconds: Seconds since the phase began.
        frames: Stack of the program, innermost frame first.
        doing: Action of an object in the stack, such as a pipeline, in words.
        waits_for: Global ranks whose messages the program waits for.
        error: Exception that the program has raised, such as "OSError: No space left on device".
        error_sites: Call sites that led to the exception, innermost first.
        non_finite: Logged values that are not finite, in words.
        facts: Values that must be identical on all ranks, by name.
        communicators: Last operations of each communicator, by the key of `FlightRecorder.communicators`.
        no_record: Reason why the dump has no operations, in words.
    """

    rank: int
    world: int
    host: str = ""
    pid: int = 0
    time: float = 0.0
    reason: str = "asked"
    step: int | None = None
    phase: str = ""
    seconds: float = 0.0
    frames: tuple[StackFrame, ...] = ()
    doing: str = ""
    waits_for: tuple[int, ...] = ()
    error: str = ""
    error_sites: tuple[str, ...] = ()
    non_finite: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    communicators: Mapping[str, Communicator] = field(default_factory=dict)
    no_record: str = ""

    def shortened(self, last: int) -> "Dump":
        """Return this dump with only the newest operations of each communicator.

        Args:
            last: Number of operations.
        """
        short = {
            key: dataclasses.replace(one, operations=one.operations[-last:]) for key, one in self.communicators.items()
        }
        return dataclasses.replace(self, communicators=short)

    def to_json(self) -> str:
        """Return the dump as text."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})


def from_json(text: str) -> Dump:
    """Read the text of `Dump.to_json`.

    Args:
        text: The text.

    Raises:
        ValueError: The text is not a dump, or another version has written it.
    """
    try:
        values = json.loads(text)
        if (version := values.pop("format")) != _FORMAT:
            raise ValueError(f"format={version}: this version reads {_FORMAT}; use the par-diagnosis that wrote it")
        values["frames"] = tuple(StackFrame(**frame) for frame in values["frames"])
        values["communicators"] = {
            label: Communicator(
                label=one["label"],
                ranks=tuple(one["ranks"]),
                operations=tuple(_operation(operation) for operation in one["operations"]),
            )
            for label, one in values["communicators"].items()
        }
        # JSON has no tuples, and operations are compared by value.
        tuples = {name: tuple(values[name]) for name in ("waits_for", "error_sites")}
        return Dump(**{**values, **tuples})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a dump of par-diagnosis: {error!r}") from error


def _operation(values: dict[str, Any]) -> Operation:
    shapes = tuple(tuple(shape) for shape in values.pop("shapes"))
    return Operation(
        **{**values, "dtypes": tuple(values["dtypes"]), "sites": tuple(values["sites"])},
        shapes=shapes,
    )


@dataclass(frozen=True, kw_only=True)
class DumpFolder:
    """Contents of a folder of dumps.

    Args:
        dumps: Dumps by rank.
        deaths: Cause of death of ranks that a signal has killed, by rank, in words.
        unreadable: Files that could not be read, in words.
    """

    dumps: Mapping[int, Dump]
    deaths: Mapping[int, str]
    unreadable: tuple[str, ...]


def read_folder(folder: Path) -> DumpFolder:
    """Read the dumps in a folder. For a rank without a dump, read the dump of torch's flight recorder.

    Args:
        folder: Folder of the dumps, or a folder that contains them as "diagnosis".

    Raises:
        ValueError: The folder does not exist, or contains no dump.
    """
    inside = folder / "diagnosis"
    folder = inside if inside.is_dir() else folder
    if not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r}: the folder does not exist; pass the folder of the dumps")
    dumps: dict[int, Dump] = {}
    torch_dumps: dict[int, Dump] = {}
    deaths: dict[int, str] = {}
    unreadable: list[str] = []
    for path in sorted(folder.iterdir()):
        try:
            if match := _RANK_FILE.fullmatch(path.name):
                dumps[int(match[1])] = from_json(path.read_text(encoding="utf-8"))
            elif match := _FATAL_FILE.fullmatch(path.name):
                if words := read_death(path.read_text(encoding="utf-8", errors="replace")):
                    deaths[int(match[1])] = words
            elif path.is_file() and (match := _TORCH_FILE.search(path.name)):
                torch_dumps[int(match[1])] = read_torch_dump(path.read_bytes(), int(match[1]))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path.name}: {error}")
    # A dump of par-diagnosis has the stack too, so it replaces a dump of torch for the same rank.
    found = {**torch_dumps, **dumps}
    if not found and not deaths:
        why = f" ({'; '.join(unreadable)})" if unreadable else ""
        raise ValueError(f"folder={str(folder)!r}: the folder contains no dump{why}; pass the folder of the dumps")
    # A dump of torch's flight recorder does not contain the number of ranks.
    world = max([dump.world for dump in found.values()] + [rank + 1 for rank in (*found, *deaths)])
    dumps = {rank: dataclasses.replace(dump, world=world) for rank, dump in sorted(found.items())}
    return DumpFolder(dumps=dumps, deaths=deaths, unreadable=tuple(unreadable))


def read_death(text: str) -> str:
    """Return the cause of death of a process in words; "" for an empty text.

    Args:
        text: Text of `faulthandler`: the signal, and the stacks of all threads, the main thread last.
    """
    if not text.strip():
        return ""
    what = re.search(r"Fatal Python error: (.+)", text)
    stack = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    # faulthandler prints the main thread last, so the last part of the text is its stack.
    calls = [(match["path"], int(match["line"])) for match in _FATAL_FRAME.finditer(stack)]
    sites = call_sites(calls)
    place = f" at {sites[0]}" if sites else ""
    signal = what[1] if what else "unknown"
    # gloo checks the size of an incoming message, and aborts the process of a rank that expects fewer bytes.
    why = ": gloo aborts a rank whose tensor is smaller than that tensor on another rank" if "Abort" in signal else ""
    return f"was killed by a signal ({signal}){place}{why}"


def read_torch_dump(data: bytes, rank: int) -> Dump:
    """Read a dump of torch's flight recorder, such as NCCL's watchdog writes.

    Args:
        data: Contents of the file: a pickle, or JSON.
        rank: Global rank, from the name of the file.

    Raises:
        ValueError: The file is not a dump of torch's flight recorder.
    """
    try:
        trace = json.loads(data) if data[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
        communicators = read_flight_trace({**trace, "entries": trace["entries"]}, 1000)
    except (KeyError, TypeError, ValueError, AttributeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"not a dump of torch's flight recorder: {error!r}") from error
    newest = max((one.began for each in communicators.values() for one in each.operations), default=0.0)
    # The file has neither the number of ranks nor the time of the dump, so both are estimated from its contents.
    return Dump(rank=rank, world=rank + 1, time=newest, reason="torch", communicators=communicators)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for dicts, lists, strings and numbers, which are all that torch's C++ code writes."""

    def find_class(self, module: str, name: str) -> Any:
        # To make an object of a class would run code that the author of the file has chosen.
        raise pickle.UnpicklingError(f"it contains {module}.{name}")
