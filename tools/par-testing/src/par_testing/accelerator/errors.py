"""What is raised, and its words, when a program breaks a rule of the device."""

from typing import Any


class StrictDeviceError(RuntimeError):
    """The program broke a rule of the device."""


class RaceError(StrictDeviceError):
    """Two streams use the same memory, and no event orders the two uses."""


class HostAccessError(StrictDeviceError):
    """The host touched memory of the device, or pinned memory under copy."""


def race(call: Any, writes: bool, found: tuple[Any, ...]) -> str:
    """Return the message for an access that no event orders behind an earlier one.

    Args:
        call: Call that makes the access.
        writes: Whether it writes.
        found: The earlier call, whether that one wrote, its tensor, the tensor of this call, and, if the memory had
            another owner then, where that owner was made and freed and where this one was made.
    """
    other, wrote, what, now, reused = found
    verb = "writes" if writes else "reads"
    mine = f"{call.name} on stream {call.queue} {verb} {now} at {_place(call.sites)}"
    theirs = (
        f"{other.name} on stream {other.queue}, issued at {_place(other.sites)}, may still "
        f"{'write' if wrote else 'read'} {what}"
    )
    if not reused:
        remedy = f"let stream {call.queue} wait for an event of stream {other.queue} recorded after it"
        return f"{mine}, while {theirs}; {remedy}"
    taken, freed, again = map(_place, reused)
    return (
        f"{mine}, in memory taken at {again} that had been taken at {taken} and freed at {freed}, while {theirs}; keep "
        f"that tensor until stream {call.queue} has waited for stream {other.queue}, or call record_stream on it "
        "before it is freed"
    )


def fault(writing: bool, call: Any, address: int) -> str:
    """Return the message for memory that the host touched and must not touch.

    Args:
        writing: Whether it wrote.
        call: Copy that uses the memory; None for memory of the device.
        address: Address that it touched.
    """
    verb = "wrote" if writing else "read"
    if call is None:
        return f"the host {verb} memory of the strict device at {address:#x}; copy the tensor to the host first"
    return (
        f"the host {verb} pinned memory while {call.name} on stream {call.queue}, issued at {_place(call.sites)}, is "
        "under way; call event.synchronize() on an event recorded after the copy first"
    )


def _place(sites: str) -> str:
    """Where in the program; empty sites are of a thread of autograd's, which runs no code of the program."""
    return sites or "backward"
