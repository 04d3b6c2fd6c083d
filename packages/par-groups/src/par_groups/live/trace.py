"""What torch's flight recorder knows of a communicator, as plain records: a pure reading of its dump, without torch.

torch's C++ code notes each collective of gloo and NCCL when it is begun, with the Python frames that led to it, in one
ring for all communicators of a process (2,000 entries unless the variable TORCH_FR_BUFFER_SIZE says otherwise). What
arrives here is that dump, unpickled: of this process, or of a file that torch has written.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SITES = 12
"""How many calls of the program an operation names, at most."""

_FOREIGN = re.compile(
    r"/(site|dist)-packages/(torch/|typing_extensions)|/lib/python3[.\d]*/(?!(site|dist)-packages)|^<"
)
"""Files of torch and of Python itself, and code without a file."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a communicator on this rank.

    Args:
        number: Its place among the collectives of its communicator on this rank, from 1; ranks that go together have
            the same operation at the same number.
        name: What it is, such as "all_reduce".
        shapes: Shapes of the tensors that go in.
        dtypes: Their dtypes, as torch's C++ code calls them, such as "Float".
        ended: Whether it is over on this rank.
        began: When it was begun, in seconds of the system's clock since 1970.
        sites: The calls of the program that led to it, innermost first, as "par_layers/layers/linear.py:88"; torch's
            own are left out.
        is_message: Whether it is a send or a receive, whose numbers are those of its pair of ranks.
    """

    number: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    ended: bool
    began: float
    sites: tuple[str, ...]
    is_message: bool = False

    @property
    def elements(self) -> int:
        """Number of elements that go in."""
        return sum(math.prod(shape) for shape in self.shapes)

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(str(list(shape)) for shape in self.shapes) or 'nothing'}"


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A process group and what a rank has done with it.

    Args:
        label: What it is called here, such as "tensor".
        ranks: Its global ranks.
        operations: Its last operations on this rank, oldest first.
    """

    label: str
    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]


def operations_of(trace: Mapping[str, Any], last: int) -> dict[str, tuple[Operation, ...]]:
    """The operations of each communicator, oldest first, by the name that torch has for it.

    Args:
        trace: A dump of torch's flight recorder, unpickled; without entries where nothing was recorded.
        last: How many operations of a communicator are kept, the newest ones.
    """
    found: dict[str, list[Operation]] = {}
    for entry in trace.get("entries", ()):
        found.setdefault(str(entry["process_group"][0]), []).append(_operation(entry))
    return {name: tuple(operations[-last:]) for name, operations in found.items()}


def _operation(entry: Mapping[str, Any]) -> Operation:
    is_message = bool(entry["is_p2p"])
    kind = str(entry["profiling_name"]).rpartition(":")[2].strip("_")
    return Operation(
        number=int(entry["p2p_seq_id"] if is_message else entry["collective_seq_id"]),
        name=kind.removesuffix("_base"),
        shapes=tuple(tuple(int(length) for length in shape) for shape in entry["input_sizes"]),
        dtypes=tuple(str(dtype) for dtype in entry["input_dtypes"]),
        ended=bool(entry["retired"]) or entry["state"] == "completed",
        began=entry["time_created_ns"] * 1e-9,
        sites=sites_of([(frame["filename"], frame["line"]) for frame in entry.get("frames", ())]),
        is_message=is_message,
    )


def sites_of(frames: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The calls of the program among some frames, as "folder/file.py:line", without those of torch and of Python.

    Args:
        frames: File and line of each frame, innermost first.
    """
    calls = [(path, line) for path, line in frames if not is_foreign(path)]
    return tuple(f"{short_path(path)}:{line}" for path, line in calls[:SITES])


def is_foreign(path: str) -> bool:
    """Whether a file is torch's or Python's own."""
    return _FOREIGN.search(path) is not None


def short_path(path: str) -> str:
    """A file as its import would name it: its path below the folder of `sys.path` that it lies in."""
    folders = [folder for folder in sys.path if folder not in ("", "/") and path.startswith(folder.rstrip("/") + "/")]
    longest = max(folders, key=len, default="")
    return path[len(longest) :].lstrip("/") if longest else path
