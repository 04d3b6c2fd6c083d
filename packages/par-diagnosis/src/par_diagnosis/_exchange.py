"""Dumps that ranks exchange over the store while no collective works.

Each exchange has a number, and these keys below the number:

    N/call           the reason, set by the rank that starts the exchange; every rank polls the key
    N/dump/RANK      the dump of a rank
    N/arrived        the number of ranks that have set their dump
    N/reporter       the first rank that adds to this key reports for all ranks
    N/reported       set after the report
    who/RANK         host and process of a rank, and whether it has left, set at the beginning

The store has its own thread and sockets, so a rank whose program is stuck still answers from another thread.
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
"""Number of operations per communicator that all ranks exchange together, at least 20 each. Files have all of them."""


@dataclass(frozen=True)
class Answers:
    """Dumps that an exchange has collected.

    Args:
        reason: Reason for the exchange, such as "SIGQUIT".
        dumps: Dumps by rank.
        absent: State of each rank without a dump, in words.
    """

    reason: str
    dumps: Mapping[int, Dump]
    absent: Mapping[int, str]


class DumpExchange:
    """The exchanges of dumps among the ranks of a job.

    Args:
        store: A connection to the store that no other thread uses.
        rank: Global rank.
        world: Number of ranks.
        patience: Seconds to wait for the other ranks in an exchange.
    """

    def __init__(self, store: Any, rank: int, world: int, patience: float) -> None:
        self._store, self._rank, self._world, self._patience = store, rank, world, patience
        # All ranks make their exchanges in the same order, so the count of each rank is the same number.
        self._prefix = f"par_diagnosis/{store.add(f'par_diagnosis/made/{rank}', 1)}"
        self._number = 1
        self._set_state("")

    def _set_state(self, left: str) -> None:
        state = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "left": left})
        self._store.set(f"{self._prefix}/who/{self._rank}", state)

    def leave(self, words: str) -> None:
        """Announce that this rank will not answer any more.

        Args:
            words: The reason, such as "has ended".
        """
        self._set_state(words)
        self._store.add(f"{self._prefix}/left", 1)

    def call(self, reason: str) -> None:
        """Start an exchange, or join one that runs.

        Args:
            reason: Reason for the exchange.
        """
        # This rank was stuck during earlier exchanges, and they have ended without it.
        while self._store.check([f"{self._prefix}/{self._number}/reported"]):
            self._number += 1
        self._store.set(f"{self._prefix}/{self._number}/call", reason)

    def called(self) -> str:
        """Return the reason for which another rank has started an exchange, or ""; one short message to the store."""
        key = f"{self._prefix}/{self._number}/call"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def answer(self, dump: Dump, report: Callable[[Answers], None]) -> str:
        """Send this rank's dump, wait for the other ranks, and let one rank report.

        Args:
            dump: Dump of this rank.
            report: Function that one rank calls with the dumps of all ranks.

        Returns:
            The reason for the exchange.
        """
        here = f"{self._prefix}/{self._number}"
        reason = self.called() or dump.reason
        # From now on, `called` checks for the next exchange.
        self._number += 1
        short = dump.shortened(max(20, min(200, _SHOWN // self._world)))
        # One server receives the dumps of all ranks: they are cut to the newest operations, and compressed.
        self._store.set(f"{here}/dump/{self._rank}", zlib.compress(short.to_json().encode()))
        self._store.add(f"{here}/arrived", 1)
        until = time.monotonic() + self._patience
        # `add` of 0 reads the counter, and a poll needs no key per rank.
        while time.monotonic() < until and self._store.add(f"{here}/arrived", 0) < self._number_present():
            time.sleep(_PAUSE)
        # `add` is atomic, so exactly one rank receives 1. It need not be rank 0, which may be the one that hangs.
        if self._store.add(f"{here}/reporter", 1) == 1:
            report(self._collect(here, reason))
            self._store.set(f"{here}/reported", "")
            return reason
        # This rank may host the store, so it stays until the reporter has read all dumps.
        while time.monotonic() < until + 1 and not self._store.check([f"{here}/reported"]):
            time.sleep(_PAUSE)
        return reason

    def _number_present(self) -> int:
        return self._world - int(self._store.add(f"{self._prefix}/left", 0))

    def _collect(self, here: str, reason: str) -> Answers:
        dumps: dict[int, Dump] = {}
        absent: dict[int, str] = {}
        for rank in range(self._world):
            key = f"{here}/dump/{rank}"
            if self._store.check([key]):
                dumps[rank] = from_json(zlib.decompress(self._store.get(key)).decode())
            else:
                absent[rank] = self._state_of(f"{self._prefix}/who/{rank}")
        return Answers(reason=reason, dumps=dumps, absent=absent)

    def _state_of(self, key: str) -> str:
        """Return the state of a rank that has not answered, in words."""
        if not self._store.check([key]):
            return "has not begun its run"
        who = json.loads(self._store.get(key))
        if who["left"]:
            return str(who["left"])
        process = f"process {who['pid']} on {who['host']}"
        # Only the kernel of the rank's own machine can be asked about its process.
        if who["host"] != socket.gethostname():
            return f"does not answer ({process})"
        state = _process_state(who["pid"])
        if not state:
            return f"is gone ({process} has ended)"
        if state == "T":
            return f"is stopped ({process})"
        # The thread of the watchdog answers even if the program hangs, unless it cannot get the GIL.
        return f"does not answer, though its process runs ({process}): a thread of it holds Python's GIL"


def _process_state(pid: int) -> str:
    """Return Linux's letter for the state of a process of this machine; "" if the process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() or not _exists(pid) else "R"
    # A zombie has ended: its parent has not read its exit status yet.
    return "" if state in "ZX" else state


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
