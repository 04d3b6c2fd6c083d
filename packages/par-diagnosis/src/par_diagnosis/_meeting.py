"""Where ranks tell each other what they are doing while no collective works: the store that they met in.

Every round has its number, and its keys below it:

    N/call           why the round is, set by whoever wants it; all look for it now and then
    N/dump/RANK      what the rank was doing
    N/arrived        how many have said so
    N/speaker        the first to count here, when all have arrived or patience is over, speaks for all
    N/spoken         set when it has
    who/RANK         the machine and process of a rank, and whether it has left, from the beginning on

The store's own thread and sockets serve them, so that a rank whose program is stuck still answers, from another thread.
"""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._dump import Dump, from_json

_PAUSE = 0.05
_SHOWN = 20_000
"""How many operations of a communicator all ranks together show each other, at least 20 each; their files have all."""


@dataclass(frozen=True)
class Heard:
    """What the ranks said in a round.

    Args:
        reason: Why the round was.
        dumps: What was said, by rank.
        absent: What is known of the others, in words.
    """

    reason: str
    dumps: Mapping[int, Dump]
    absent: Mapping[int, str]


class Meeting:
    """The rounds of one group of ranks.

    Args:
        store: The store, on a connection of its own.
        rank: This rank.
        world: The number of ranks.
        patience: Seconds to wait for the others in a round.
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float) -> None:
        self._store, self._rank, self._world, self._patience = store, rank, world, patience
        number = store.add(f"par_diagnosis/made/{rank}", 1)  # all ranks make theirs in the same order
        self._prefix = f"par_diagnosis/{number}"
        self._round = 1
        self._say_who("")

    def _say_who(self, left: str) -> None:
        who = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "left": left})
        self._store.set(f"{self._prefix}/who/{self._rank}", who)

    def leave(self, words: str) -> None:
        """Says that this rank answers no more, and why, such as "has ended"."""
        self._say_who(words)

    def call(self, reason: str) -> None:
        """Asks all ranks to a round: to the next one that is not over, where this rank was late."""
        while self._store.check([f"{self._prefix}/{self._round}/spoken"]):
            self._round += 1
        self._store.set(f"{self._prefix}/{self._round}/call", reason)

    def called(self) -> str:
        """Why ranks are asked to a round now; "" if they are not. One short message to the store."""
        key = f"{self._prefix}/{self._round}/call"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def take_part(self, dump: Dump, speak: Callable[[Heard], None]) -> str:
        """Tells the others, waits for them, and lets one rank speak.

        Args:
            dump: What this rank is doing.
            speak: Called on one rank alone, with what was heard.

        Returns:
            Why the round was.
        """
        here = f"{self._prefix}/{self._round}"
        reason = self.called() or dump.reason
        self._round += 1
        self._store.set(
            f"{here}/dump/{self._rank}",
            zlib.compress(dump.shortened(max(20, min(200, _SHOWN // self._world))).to_json().encode()),
        )
        self._store.add(f"{here}/arrived", 1)
        until = time.monotonic() + self._patience
        while time.monotonic() < until and self._store.add(f"{here}/arrived", 0) < self._world - self._count_left():
            time.sleep(_PAUSE)
        if self._store.add(f"{here}/speaker", 1) == 1:
            speak(self._hear(here, reason))
            self._store.set(f"{here}/spoken", "")
            return reason
        while time.monotonic() < until + 1 and not self._store.check([f"{here}/spoken"]):
            time.sleep(_PAUSE)  # the speaker may need this rank's store
        return reason

    def _count_left(self) -> int:
        """How many ranks will not come, as they have said."""
        return int(self._store.add(f"{self._prefix}/left", 0))

    def note_left(self) -> None:
        """Counts this rank among those that will not come."""
        self._store.add(f"{self._prefix}/left", 1)

    def _hear(self, here: str, reason: str) -> Heard:
        dumps: dict[int, Dump] = {}
        absent: dict[int, str] = {}
        for rank in range(self._world):
            key = f"{here}/dump/{rank}"
            if self._store.check([key]):
                dumps[rank] = from_json(zlib.decompress(self._store.get(key)).decode())
            else:
                absent[rank] = self._fate(f"{self._prefix}/who/{rank}")
        return Heard(reason=reason, dumps=dumps, absent=absent)

    def _fate(self, key: str) -> str:
        """What the store knows of a rank that does not come to a meeting."""
        if not self._store.check([key]):
            return "has not begun its run"
        who = json.loads(self._store.get(key))
        if who["left"]:
            return str(who["left"])
        process = f"process {who['pid']} on {who['host']}"
        if who["host"] != socket.gethostname():
            return f"does not answer ({process})"
        state = _state_of(who["pid"])
        if not state:
            return f"is gone ({process} has ended)"
        if state == "T":
            return f"is stopped ({process})"
        return f"does not answer, though its process runs ({process}): it keeps Python's interpreter to itself"


def _state_of(pid: int) -> str:
    """The letter that Linux has for the state of a process of this machine; "" if it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() or not _is_there(pid) else "R"
    return "" if state in "ZX" else state


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
