"""What strict groups need of a device, if their tensors lie on one."""

from typing import Protocol

from torch import Tensor

from .clock import HasTime


class OnDevice(Protocol):
    """An operation that a device has been given."""

    def wait(self, until: float, site: str) -> None:
        """Holds the current stream back until it is done, at that virtual time; `site` is the place that issued it."""


class DeviceOfRank(Protocol):
    """The device of a rank."""

    @property
    def type(self) -> str:
        """Its type, as torch names it."""

    @property
    def time(self) -> HasTime:
        """The time of its current stream."""

    def issue(self, communicator: str, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> OnDevice:
        """Gives an operation to the stream of its communicator."""

    def view(self, tensor: Tensor) -> Tensor:
        """A tensor of the device as one of the CPU, on the same memory."""
