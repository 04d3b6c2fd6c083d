"""Dumps of torch's flight recorder as plain records. Pure functions, without torch.

When a collective of gloo or NCCL begins, torch's C++ code records it with the Python stack. All communicators of a
process share one ring buffer of 2,000 entries; the variable TORCH_FR_BUFFER_SIZE changes that number. This module reads
an unpickled dump of the buffer, either of this process or from a file that torch has written.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SITES = 12
"""Largest number of call sites that an operation keeps."""

_FOREIGN = re.compile(
    r"/(site|dist)-packages/(torch/|typing_extensions)|/lib/python3[.\d]*/(?!(site|dist)-packages)|^<"
)
"""Files of torch and of Python, and code without a file."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a communicator on this rank.

    Args:
        number: Position among the collectives of its communicator on this rank, from 1. Ranks of a correct program have
            the same operation at the same number.
        name: Name of the operation, such as "all_reduce".
        shapes: Shapes of the input tensors.
        dtypes: Dtypes of the input tensors in torch's C++ names, such as "Float".
        ended: Whether the operation has ended on this rank.
        began: Start of the operation, in seconds since 1970.
        sites: Call sites in the program, innermost first, such as "par_layers/layers/linear.py:88". Frames of torch and
            of Python are omitted.
        is_message: Whether the operation is a send or a receive, which are numbered for each pair of ranks.
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
        """Number of elements of the input tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(str(list(shape)) for shape in self.shapes) or 'nothing'}"


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """A process group and its last operations on one rank.

    Args:
        label: Name of the group, such as "tensor"; "" for a group without a name.
        ranks: Global ranks of the group.
        operations: Last operations on this rank, oldest first.
    """

    label: str
    ranks: tuple[int, ...]
    operations: tuple[Operation, ...]


def read_flight_trace(trace: Mapping[str, Any], last: int) -> dict[str, Communicator]:
    """Return the communicators of a dump by torch's name of each process group.

    Args:
        trace: Unpickled dump of torch's flight recorder.
        last: Largest number of operations per communicator; older operations are omitted.
    """
    found: dict[str, list[Operation]] = {}
    descriptions: dict[str, str] = {}
    for entry in trace.get("entries", ()):
        name, descriptions[str(name)] = entry["process_group"]
        found.setdefault(str(name), []).append(_operation(entry))
    members = {
        str(config["name"]): tuple(json.loads(config["ranks"]))
        for config in trace.get("pg_config", {}).values()
        if config.get("ranks")
    }
    return {
        name: Communicator(
            label=label_of(descriptions[name]), ranks=members.get(name, ()), operations=tuple(operations[-last:])
        )
        for name, operations in found.items()
    }


def label_of(description: str) -> str:
    """Return a label for a process group from torch's description of it; "" for a group without a description.

    Args:
        description: "default_pg", "undefined", "mesh_" and the name of a mesh dimension, or any other text.
    """
    # par's own groups are described by the name of their axis.
    return {"default_pg": "world", "undefined": ""}.get(description, description.removeprefix("mesh_"))


def _operation(entry: Mapping[str, Any]) -> Operation:
    is_message = bool(entry["is_p2p"])
    # torch writes the backend and the variant into the name, as in "nccl:_reduce_scatter_base".
    kind = str(entry["profiling_name"]).rpartition(":")[2].strip("_")
    return Operation(
        number=int(entry["p2p_seq_id"] if is_message else entry["collective_seq_id"]),
        name=kind.removesuffix("_base"),
        shapes=tuple(tuple(int(length) for length in shape) for shape in entry["input_sizes"]),
        dtypes=tuple(str(dtype) for dtype in entry["input_dtypes"]),
        ended=bool(entry["retired"]) or entry["state"] == "completed",
        began=entry["time_created_ns"] * 1e-9,
        sites=call_sites([(frame["filename"], frame["line"]) for frame in entry.get("frames", ())]),
        is_message=is_message,
    )


def call_sites(frames: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return the frames of the program as "folder/file.py:line", without the frames of torch and of Python.

    Args:
        frames: File and line of each frame, innermost first.
    """
    calls = [(path, line) for path, line in frames if not is_library_path(path)]
    return tuple(f"{shorten_path(path)}:{line}" for path, line in calls[:SITES])


def is_library_path(path: str) -> bool:
    """Return whether a file belongs to torch or to Python."""
    return _FOREIGN.search(path) is not None


def shorten_path(path: str) -> str:
    """Return the path of a file relative to the folder of `sys.path` that contains it."""
    folders = [folder for folder in sys.path if folder not in ("", "/") and path.startswith(folder.rstrip("/") + "/")]
    longest = max(folders, key=len, default="")
    return path[len(longest) :].lstrip("/") if longest else path
