"""The last operations of each process group, read from torch's flight recorder.

Nothing is wrapped or patched. torch records every collective with its call site, whichever way it is called:
`torch.distributed`, functional collectives, methods of a group, DDP, FSDP2 or compiled graphs. `FlightRecorder` selects
the process groups and names them. It adds no time to a step, and a program can make one at any moment.
"""

import os
from collections.abc import Mapping

import torch.distributed as dist

from .._torch_private import flight_trace, groups_by_name, operations_begun
from .process_groups import ProcessGroups
from .trace import Communicator, label_of, read_flight_trace

_SWITCHES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


class FlightRecorder:
    """The last operations of process groups: name, shape, dtype, call site, and whether each has ended.

    Args:
        groups: Process groups by label, or the live groups of a topology. Default: all groups of the process with
            several ranks, including groups that the program makes later.
        last: Largest number of operations per communicator, the newest. torch keeps 2,000 operations of all
            communicators of a process; set the variable TORCH_FR_BUFFER_SIZE before the first group is made to change
            that number.

    Attributes:
        missing: Reason why torch records no operations, in words; "" if torch records them.

    Raises:
        ValueError: `last` is below 1.

    Example:
        recorder = FlightRecorder(groups)
        for operation in recorder.communicators()["tensor"].operations:
            print(operation.number, operation, operation.sites[0], operation.ended)
    """

    def __init__(
        self, groups: ProcessGroups | Mapping[str, dist.ProcessGroup] | None = None, *, last: int = 1000
    ) -> None:
        if last < 1:
            raise ValueError(f"last={last}: the number of operations of each communicator must be 1 or more")
        self._given = groups.named() if isinstance(groups, ProcessGroups) else groups
        self._last = last
        off = next((name for name in _SWITCHES if os.environ.get(name) == "0"), None)
        self.missing = f"{off} is 0, which turns torch's flight recorder off; unset it" if off else ""

    def communicators(self) -> dict[str, Communicator]:
        """Return the last operations of each communicator, without communication.

        The keys are the labels of the given groups. Without given groups, the keys are torch's names of the groups,
        which are the same on all ranks of a group. 2,000 operations take about 30 ms. The first call in a process takes
        about one second more, because torch then imports the code that resolves call sites.
        """
        found = {} if self.missing else read_flight_trace(flight_trace(), self._last)
        return {
            key: Communicator(
                label=label,
                ranks=tuple(dist.get_process_group_ranks(group)),
                operations=found[group.group_name].operations if group.group_name in found else (),
            )
            for key, label, group in self._groups()
        }

    def begun(self) -> tuple[int, ...]:
        """Return the number of operations that each communicator has begun on this rank; takes a microsecond.

        The number is 0 for a backend that does not count its operations.
        """
        return tuple(operations_begun(group) for _, _, group in self._groups())

    def _groups(self) -> list[tuple[str, str, dist.ProcessGroup]]:
        """Return key, label and group of each communicator."""
        if self._given is not None:
            return [(label, label, group) for label, group in self._given.items()]
        several = [(name, group) for name, group in groups_by_name().items() if group.size() > 1]
        return [(name, label_of(group.group_desc), group) for name, group in several]
