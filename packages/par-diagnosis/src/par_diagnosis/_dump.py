"""What one rank was doing, as a record and as a file; and reading the files of a job that has died. No torch."""

import dataclasses
import io
import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from par_groups.live.trace import Communicator, Operation, operations_of, sites_of

_FORMAT = 1
_RANK_FILE = re.compile(r"rank-(\d+)\.json")
_FATAL_FILE = re.compile(r"rank-(\d+)\.fatal")
_TORCH_FILE = re.compile(r"(?:trace|fr|flight|debug)\w*?_?(?:rank_?)?(\d+)(?:\.pickle|\.pkl)?", re.IGNORECASE)
_FATAL_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A call that is under way.

    Args:
        site: Its file and line, as "package/module.py:88".
        function: The function's name.
        code: The text of the line; "" where there is none.
        is_foreign: Whether it is torch's or Python's own.
    """

    site: str
    function: str
    code: str = ""
    is_foreign: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """What a rank was doing at one moment.

    Args:
        rank: Its global rank.
        world: The number of ranks.
        host: Its machine.
        pid: Its process.
        time: When it was asked, in seconds since 1970.
        reason: Why: "timeout", "SIGQUIT", "error", or "asked" by another rank.
        step: Steps done; None where nobody has told.
        phase: What it spends its time on, such as "data"; "" where nobody has told.
        seconds: How long it has been in that phase.
        frames: What its program is in, innermost first.
        doing: What its pipeline is in, in words.
        waits_for: Global ranks of whose messages it waits.
        error: What it has failed with, such as "OSError: ..."; "".
        error_sites: The calls that led to the error, innermost first.
        not_finite: What it has last logged that was not a finite number, in words; "".
        facts: What it was told, which ranks should have alike, by name.
        communicators: What each of its communicators has done, by label.
        no_record: Why there are no operations of communicators, in words; "".
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
    frames: tuple[Frame, ...] = ()
    doing: str = ""
    waits_for: tuple[int, ...] = ()
    error: str = ""
    error_sites: tuple[str, ...] = ()
    not_finite: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    communicators: Mapping[str, Communicator] = field(default_factory=dict)
    no_record: str = ""

    def shortened(self, last: int) -> "Dump":
        """This dump with the newest operations of each communicator alone.

        Args:
            last: How many of each.
        """
        short = {
            label: dataclasses.replace(one, operations=one.operations[-last:])
            for label, one in self.communicators.items()
        }
        return dataclasses.replace(self, communicators=short)

    def to_json(self) -> str:
        """The dump as text."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)})


def from_json(text: str) -> Dump:
    """The dump that `Dump.to_json` gave.

    Raises:
        ValueError: It is none, or another version's.
    """
    try:
        values = json.loads(text)
        if (version := values.pop("format")) != _FORMAT:
            raise ValueError(f"it has format {version}, this version of par-diagnosis reads {_FORMAT}")
        values["frames"] = tuple(Frame(**frame) for frame in values["frames"])
        values["communicators"] = {
            label: Communicator(
                label=one["label"],
                ranks=tuple(one["ranks"]),
                operations=tuple(_operation(operation) for operation in one["operations"]),
            )
            for label, one in values["communicators"].items()
        }
        tuples = {name: tuple(values[name]) for name in ("waits_for", "error_sites")}
        return Dump(**{**values, **tuples})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no dump of par-diagnosis: {error!r}") from error


def _operation(values: dict[str, Any]) -> Operation:
    shapes = tuple(tuple(shape) for shape in values.pop("shapes"))
    return Operation(
        **{**values, "dtypes": tuple(values["dtypes"]), "sites": tuple(values["sites"])},
        shapes=shapes,
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a folder has of a job.

    Args:
        dumps: The dumps by rank.
        deaths: What is known of ranks that have died by a signal, by rank, in words.
        unreadable: What could not be read, in words.
    """

    dumps: Mapping[int, Dump]
    deaths: Mapping[int, str]
    unreadable: tuple[str, ...]


def read_folder(folder: Path) -> Found:
    """The dumps in a folder: par-train's, and for ranks that have none those of torch's flight recorder.

    Args:
        folder: The folder of the dumps, or that of the run.

    Raises:
        ValueError: There is no such folder, or no dump in it.
    """
    inside = folder / "diagnosis"
    folder = inside if inside.is_dir() else folder
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}; give the folder of a run, or of the dumps that it left")
    dumps: dict[int, Dump] = {}
    torchs: dict[int, Dump] = {}
    deaths: dict[int, str] = {}
    unreadable: list[str] = []
    for path in sorted(folder.iterdir()):
        try:
            if match := _RANK_FILE.fullmatch(path.name):
                dumps[int(match[1])] = from_json(path.read_text(encoding="utf-8"))
            elif match := _FATAL_FILE.fullmatch(path.name):
                if words := death_of(path.read_text(encoding="utf-8", errors="replace")):
                    deaths[int(match[1])] = words
            elif path.is_file() and (match := _TORCH_FILE.search(path.name)):
                torchs[int(match[1])] = dump_of_torch(path.read_bytes(), int(match[1]))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path.name}: {error}")
    torchs = {rank: dump for rank, dump in torchs.items() if rank not in dumps}
    found = {**torchs, **dumps}
    if not found and not deaths:
        why = f" ({'; '.join(unreadable)})" if unreadable else ""
        raise ValueError(f"there is no dump in {str(folder)!r}{why}; give the folder of a run that has left some")
    world = max([dump.world for dump in found.values()] + [rank + 1 for rank in (*found, *deaths)])
    dumps = {rank: dataclasses.replace(dump, world=world) for rank, dump in sorted(found.items())}
    return Found(dumps=dumps, deaths=deaths, unreadable=tuple(unreadable))


def death_of(text: str) -> str:
    """What Python has written when a signal ended a process, in words; "" for an empty file.

    Args:
        text: What `faulthandler` writes: the signal, and the stacks of all threads, that of the main thread last.
    """
    if not text.strip():
        return ""
    what = re.search(r"Fatal Python error: (.+)", text)
    stack = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    calls = [(match["path"], int(match["line"])) for match in _FATAL_FRAME.finditer(stack)]
    sites = sites_of(calls)
    place = f" at {sites[0]}" if sites else ""
    signal = what[1] if what else "unknown"
    why = (
        ", as gloo ends a rank that gets more bytes than it expects: it brings another shape"
        if "Abort" in signal
        else ""
    )
    return f"was ended by a signal ({signal}){place}{why}"


def dump_of_torch(data: bytes, rank: int) -> Dump:
    """The dump that torch's flight recorder has written for a rank, such as NCCL's watchdog does.

    Args:
        data: The file: a pickle, or JSON.
        rank: The rank, which its name says.

    Raises:
        ValueError: It is none.
    """
    try:
        trace = json.loads(data) if data[:1] == b"{" else _Plain.loads(data)
        operations = operations_of(trace, 1000)
        names = {str(entry["process_group"][0]): str(entry["process_group"][1]) for entry in trace["entries"]}
        members = {
            str(config["name"]): tuple(json.loads(config["ranks"]))
            for config in trace.get("pg_config", {}).values()
            if config.get("ranks")
        }
    except (KeyError, TypeError, ValueError, AttributeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"it is no dump of torch's flight recorder: {error!r}") from error
    communicators = {
        f"{names[name]} {name}" if names[name] else name: Communicator(
            label=f"{names[name]} {name}" if names[name] else name, ranks=members.get(name, ()), operations=done
        )
        for name, done in operations.items()
    }
    newest = max((one.began for done in operations.values() for one in done), default=0.0)
    return Dump(rank=rank, world=rank + 1, time=newest, reason="torch", communicators=communicators)


class _Plain(pickle.Unpickler):
    """Reads what torch pickles in C++, dicts, lists, strings and numbers, and no classes: a file may be anybody's."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")

    @classmethod
    def loads(cls, data: bytes) -> Any:
        """Unpickles bytes."""
        return cls(io.BytesIO(data)).load()
