"""The flight recorder of process groups: the last operations of each, for whoever asks what a rank was doing.

Nothing is wrapped and nothing patched. torch notes every collective itself, below all the ways that lead to one
(`torch.distributed`, functional collectives, methods of a group, DDP, FSDP2, compiled graphs), with its call site; this
object knows which communicators are asked for, what they are called here, and reads what torch has noted. So it costs a
step nothing, and can be made after the fact.
"""

import os
from collections.abc import Mapping

import torch.distributed as dist

from .._torch_private import flight_trace, operations_begun
from .process_groups import ProcessGroups
from .trace import Communicator, operations_of

_SWITCHES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class FlightRecorder:
    """The last operations of process groups: name, shape, dtype, call site, and whether each has ended.

    Args:
        groups: The live groups of a topology, of which all with several ranks are read, and the world; or any process
            groups by their labels.
        last: How many operations of each communicator are given, the newest ones. torch keeps the newest 2,000 of all
            communicators of a process together; the variable TORCH_FR_BUFFER_SIZE, read when the process makes its
            first group, changes that.

    Attributes:
        missing: Why there are no operations, in words; "" if torch records them.

    Raises:
        ValueError: `last` is below 1.

    Example:
        recorder = FlightRecorder(groups)
        for operation in recorder.communicators()["tensor"].operations:
            print(operation.number, operation, operation.sites[0], operation.ended)
    """

    def __init__(self, groups: ProcessGroups | Mapping[str, dist.ProcessGroup], *, last: int = 1000) -> None:
        if last < 1:
            raise ValueError(f"last is {last}; give the number of operations of each communicator, 1 or more")
        named = groups.named() if isinstance(groups, ProcessGroups) else dict(groups)
        self._groups = named
        self._ranks = {label: tuple(dist.get_process_group_ranks(group)) for label, group in named.items()}
        self._last = last
        off = next((name for name in _SWITCHES if os.environ.get(name) == "0"), None)
        self.missing = f"{off} is 0, which turns torch's flight recorder off; unset it" if off else ""

    def communicators(self) -> dict[str, Communicator]:
        """What each communicator has done up to now, by its label. No communication.

        2,000 operations take some 30 ms; the first call in a process takes a second more, in which torch imports what
        finds the call sites.
        """
        operations = {} if self.missing else operations_of(flight_trace(), self._last)
        return {
            label: Communicator(
                label=label, ranks=self._ranks[label], operations=operations.get(str(group.group_name), ())
            )
            for label, group in self._groups.items()
        }

    def begun(self) -> tuple[int, ...]:
        """How many operations each communicator has begun on this rank, in the order of the labels; a microsecond.

        A backend that does not count, such as one in Python, has 0.
        """
        return tuple(operations_begun(group) for group in self._groups.values())
