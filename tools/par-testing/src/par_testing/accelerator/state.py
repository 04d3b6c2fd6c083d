"""What one process keeps of its device: how strict it is, and what it has seen."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ..strict.step import HostWaitError, refuse_in_step
from .errors import RaceError, race
from .options import Accelerator

_CALLS = 200_000
"""The most calls that a timeline holds, so that a long test which never reads it stays small."""


@dataclass
class State:
    """The device of this process.

    Attributes:
        native: The part in C++; None before the device is made.
        rules: How strict it is.
        waits: How often the host waited for the device, by what it did and where.
        pageable: How often a copy was to be non_blocking and was not, as its memory was not pinned, by where.
        races: Messages of races that were not raised.
        calls: The calls that the times last read have left out, each with the row in which a timeline shows it.
    """

    native: Any = None
    rules: Accelerator = field(default_factory=Accelerator)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    races: list[str] = field(default_factory=list)
    calls: deque[tuple[str, Any]] = field(default_factory=lambda: deque(maxlen=_CALLS))

    def use(self, call: Any, tensor: Any, *, write: bool) -> Any:
        """Note that a call uses a tensor, of the device or pinned, and return it as a tensor of the CPU.

        Raises:
            RaceError: Another stream may be using it.
        """
        seen, found = self.native.use(call, tensor, write)
        if found is not None:
            words = race(call, write, found)
            if self.rules.races == "error":
                raise RaceError(words)
            self.races.append(words)
        return seen

    def close(self, call: Any, seconds: float, engine: str) -> None:
        """Note how long a call takes in virtual time.

        Args:
            call: The call.
            seconds: How long.
            engine: What it keeps busy: "compute", or "into" or "out" for copies to and from the device.
        """
        self.native.close(call, seconds, engine)
        self.calls.append((f"stream {call.queue} {engine}", call))

    def wait(self, call: Any, what: str) -> None:
        """Let the host wait for the stream of a call, and count that.

        Raises:
            HostWaitError: The test refuses waits, everywhere or in this step.
        """
        where = self.native.sites()
        self.waits[what, where] += 1
        if self.rules.waits == "error":
            raise HostWaitError(f"{what} at {where}: the host would wait for the device there")
        refuse_in_step(what)
        self.native.host_waits(call)


state = State()
