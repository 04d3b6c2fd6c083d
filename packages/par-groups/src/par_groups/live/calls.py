"""The calls that all ranks must make, and a watch that raises on all ranks if they make different ones.

A rank that leaves out a step, or evaluates alone, waits in a collective for ranks that wait in another one. No message
can tell them so. But each rank has a record of its calls since the ranks last agreed, and a thread that looks at it
every few seconds. If nothing was called between two looks, the rank writes its record to the store of the rendezvous,
and reads the records of some other ranks. A call only appends to the record.

A verdict needs two ranks that have stood still for two looks, and whose records differ, so that neither is the
beginning of the other. A rank that is slow, or that computes for minutes, has a record that is the beginning of the
others' records.
"""

import json
import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._torch_private import default_store, timeout_of
from .trace import call_sites

_PERIOD = 5.0
"""Seconds between two looks."""

_LOOKS_BEFORE_NOTICE = 12
"""Number of looks, a minute, after which a rank that waits logs a warning about a rank that is elsewhere."""

_logger = logging.getLogger(__name__)

_REMEDY = (
    "make the same calls on all ranks: decide to leave out a pass or a step by a value that all ranks share, such as "
    "the norm of `clip_grad_norm_`, and remove `if rank == 0` around a call that all ranks make together"
)


class CallWatch:
    """The calls of this rank since the ranks last agreed, and a watch over the calls of other ranks.

    Args:
        group: Ranks that make the same calls.
        on_parted: Function that receives this object when the ranks have made different calls. It lets the collectives
            of the calls fail, so that no rank waits for them any longer.
        waits_in: File in which the calls wait for collectives, such as "par_zero/_collectives.py". Its folder is the
            package of the calls, whose own lines no message names.
        resets: Call that a rank may make from any place after an exception, in words.

    Attributes:
        calls: Calls since the ranks last agreed, in words. They may not have ended yet.
    """

    def __init__(
        self, group: dist.ProcessGroup, on_parted: "Callable[[CallWatch], None]", *, waits_in: str, resets: str
    ) -> None:
        self.calls: list[str] = []
        self._on_parted, self._waits_in, self._reset = on_parted, waits_in, resets
        self._package = waits_in.partition("/")[0]
        self._agreed = 0  # how often the ranks have agreed
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        self._period = _PERIOD
        self._thread = 0  # number of the thread that makes the calls; 0: no call was made
        self._seen: tuple[int, int] | None = None  # at the last look
        self._looks = 0  # since the latest call
        self._peers: dict[int, dict[str, Any]] = {}  # records of ranks that stood still at the last look
        self._verdict: str | None = None
        self._resets = 0
        self._store: Any = None
        # Groups of torch's fake backend have no other process behind them.
        if len(self._ranks) > 1 and dist.get_backend(group) != "fake":
            timeout = timeout_of(group)
            if timeout is not None:
                self._period = min(_PERIOD, timeout.total_seconds() / 8)
            self._store = PrefixStore(f"{self._package}/{group.group_name}", default_store())
            # Another watch over the same group has records of its own.
            self._store = PrefixStore(str(self._store.add(f"watches/{self._rank}", 1)), self._store)

    def note(self, call: str) -> None:
        """Record a call that all ranks make together. It begins now.

        Args:
            call: Call in words, with its verb, such as "calls optimizer.step()".
        """
        self.calls.append(call)
        if not self._thread and self._store is not None:
            self._thread = threading.get_ident()
            look = weakref.WeakMethod(self._look)
            threading.Thread(
                target=_watch, args=(look, self._period), name=f"{self._package}-watch", daemon=True
            ).start()

    def agree(self) -> None:
        """Begin a new record, because a collective has shown that all ranks have made the same calls."""
        self.calls = []
        self._agreed += 1

    def await_reset(self) -> None:
        """Wait until all ranks make the call that resets.

        Raises:
            RuntimeError: The ranks make different calls.
        """
        if self._store is None:
            return
        self._resets += 1
        key = f"resets/{self._resets}"
        self._store.add(key, 1)
        pause = 0.0001
        # In this thread, because no other thread could stop a rank that waits for the rendezvous of a communicator.
        while self._store.add(key, 0) < len(self._ranks):
            if self._verdict is not None:
                raise RuntimeError(self._verdict)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return the error to raise in place of the error of a collective: the verdict, if there is one.

        Args:
            error: Error of a collective of the calls.
        """
        if self._store is None:
            return error
        try:
            verdict = self._verdict or self._read("verdict")
            if verdict:
                return RuntimeError(verdict)
            text = self._wait_text(self._read_records())
        except RuntimeError:  # the store is gone with the process that had it
            return error
        is_timeout = re.search("timed? ?out", str(error), re.IGNORECASE)
        return RuntimeError(f"{text} ({error!s:.100})") if text and is_timeout else error

    def _wait_text(self, records: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Return the text about a rank that stands still outside of the watched collectives; None if there is none."""
        for rank, record in records.items():
            if record["agreed"] == self._agreed and not record["waits"]:
                return (
                    f"rank {self._ranks[self._rank]} {self._last(self.calls)} and waits for rank {self._ranks[rank]}, "
                    f"which is at {record['at']} and {self._last(record['calls'])} last; {_REMEDY}"
                )
        return None

    def _look(self) -> bool:
        """Look whether this rank stands still, and whether the ranks have parted. Return whether the watch ends."""
        now = (self._agreed, len(self.calls))
        if now != self._seen:
            self._seen, self._looks = now, 0
            self._peers = {}
            return False
        self._looks += 1
        waits, at = self._place_of(self._thread)
        mine = {"agreed": self._agreed, "calls": list(self.calls), "waits": waits, "at": at}
        try:
            self._store.set(f"records/{self._rank}", json.dumps({**mine, "look": time.time()}))
            verdict = self._read("verdict")
            before, self._peers = self._peers, self._read_records()
            for rank, record in self._peers.items():
                # A record that is older than the last look may be from before calls that its rank makes now.
                if verdict is None and rank in before and before[rank]["look"] < record["look"]:
                    verdict = self._verdict_on(mine, rank, record)
            if verdict is None:
                if waits and self._looks == _LOOKS_BEFORE_NOTICE and (text := self._wait_text(self._peers)):
                    _logger.warning("%s", text)
                return False
            # All ranks raise the text that came first.
            self._verdict = self._store.compare_set("verdict", "", verdict).decode()
            self._store.add("heard", 1)
            # This rank may be the one that has the store. It must not end before the other ranks have read the text.
            end = time.monotonic() + 3 * self._period
            while self._store.add("heard", 0) < len(self._ranks) and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:  # the store is gone, and with it the other ranks
            if self._verdict is None:
                return True
        self._on_parted(self)
        return True

    def _verdict_on(self, mine: dict[str, Any], rank: int, record: dict[str, Any]) -> str | None:
        """Return the text of the error, if this rank and another one make different calls; else None."""
        if record["agreed"] != mine["agreed"]:
            return None
        pair = sorted([(self._rank, mine), (rank, record)], key=lambda each: each[0])
        calls = [each["calls"] for _, each in pair]
        place = next((place for place, (a, b) in enumerate(zip(*calls, strict=False)) if a != b), None)
        if place is None:
            return None
        # After an exception each rank may reset from another place. It need not be there yet.
        if any(self._reset in each["calls"] for _, each in pair) and not all(
            each["waits"] or self._reset in each["calls"] for _, each in pair
        ):
            return None
        if all(self._reset in each for each in calls):
            return None
        (first, one), (second, other) = pair
        return (
            f"rank {self._ranks[second]} {calls[1][place]} (now at {other['at']}) where rank {self._ranks[first]} "
            f"{calls[0][place]} (now at {one['at']}), so each waits for a call that the other does not make; {_REMEDY}"
        )

    def _read_records(self) -> dict[int, dict[str, Any]]:
        """Return the records of the ranks 1, 2, 4, ... behind this one, as far as they stand still."""
        # Records of all ranks would load the store with the square of their number.
        size = len(self._ranks)
        ranks = [(self._rank + (1 << power)) % size for power in range((size - 1).bit_length())]
        read = {rank: self._read(f"records/{rank}") for rank in ranks}
        return {rank: json.loads(text) for rank, text in read.items() if text}

    def _read(self, key: str) -> str | None:
        """Return a text of the store, or None. It never waits for the text."""
        text: str | None = self._store.get(key).decode() if self._store.check([key]) else None
        return text

    def _place_of(self, thread: int) -> tuple[bool, str]:
        """Return whether a thread waits for a watched collective, and the line of the program at which it is."""
        frames: list[tuple[str, int]] = []
        frame = sys._current_frames().get(thread)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        sites = call_sites(frames)
        own = f"{self._package}/"
        line = next((site for site in sites if not site.startswith(own)), "an unknown line")
        return any(site.startswith(self._waits_in) for site in sites), line

    def _last(self, calls: Sequence[str]) -> str:
        return calls[-1] if calls else f"makes no call of {self._package}"


def _watch(look: weakref.WeakMethod[Callable[[], bool]], period: float) -> None:
    """Look again and again, until the watch ends or nobody has it any longer."""
    while True:
        time.sleep(period)
        method = look()
        if method is None or method():
            return
        del method  # while this thread sleeps, it must not keep the module alive
