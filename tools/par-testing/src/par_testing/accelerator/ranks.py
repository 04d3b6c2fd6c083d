"""Collectives of strict groups on tensors of the device.

As with NCCL, each communicator has a stream of its own: an operation begins after what the current stream has been
given, and `wait` holds back the current stream, not the host. The bytes travel as those of CPU tensors do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .options import NAME
from .state import state
from .times import wait_for_jobs


class DeviceCollective:
    """One operation of a communicator's stream, whose tensors are noted as used until somebody waits for it.

    Args:
        stream: The communicator's stream.
        name: Such as "all_gather".
        inputs: Tensors that it reads.
        outputs: Tensors that it writes.
    """

    def __init__(self, stream: Any, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        module = torch.get_device_module(NAME)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            call = state.native.open(name)
            for tensor in inputs:
                state.use(call, tensor, write=False)
            for tensor in outputs:
                for part in _written(tensor, inputs):
                    state.use(call, part, write=True)
            # It takes no time here: the referee knows when all ranks have come, and `wait` hears of it.
            state.close(call, 0.0, "ranks")
            self._end = stream.record_event()

    def wait(self, until: float, site: str) -> None:
        """Hold the current stream back until the operation is done.

        Args:
            until: Its end in virtual time.
            site: The place that issued it.
        """
        torch.get_device_module(NAME).current_stream().wait_event(self._end)
        state.native.stream_waits(until, site)


class StreamTime:
    """The clock of a rank whose work is a device's: the time of the current stream."""

    @property
    def now(self) -> float:
        """The time at which the current stream would begin what it is given now."""
        wait_for_jobs()
        return state.native.now()  # type: ignore[no-any-return]

    def wait(self, end: float, site: str) -> None:
        """Do nothing: `DeviceCollective.wait` holds the stream back."""

    def work(self, name: str, seconds: float) -> None:
        """Do nothing: an operator on the host takes no time of a stream."""


class RankDevice:
    """What strict groups of a rank need to know of its device."""

    type = NAME
    time = StreamTime()

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}

    def issue(self, communicator: str, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> DeviceCollective:
        """Give an operation to the stream of its communicator.

        Raises:
            RaceError: Another stream than the current one may be using a tensor.
        """
        if communicator not in self._streams:
            self._streams[communicator] = torch.get_device_module(NAME).Stream()
        return DeviceCollective(self._streams[communicator], name, inputs, outputs)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the device as one of the CPU, on the same memory."""
        return state.native.cpu_view(tensor)  # type: ignore[no-any-return]


def _written(output: Tensor, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parts of an output that are written: an all-gather in place leaves this rank's own part as it is."""
    begin = output.data_ptr()
    own = next((each for each in inputs if begin <= each.data_ptr() < begin + output.nbytes), None)
    if own is None or own.nbytes == output.nbytes:
        yield output
        return
    flat, first = output.view(-1), (own.data_ptr() - begin) // output.itemsize
    yield flat[:first]
    yield flat[first + own.numel() :]
