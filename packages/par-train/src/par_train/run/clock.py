"""Where the time of a run goes: what its loop spends on data, steps and checkpoints, and in steps on other ranks.

Phases are timed as they follow each other, so that they add up to the wall time. What a step waits for other ranks is
sampled: a thread looks 20 times a second whether the program is inside of a collective, and of which group. That is the
truth where the host waits itself, as under gloo; on a GPU kernels wait and hosts do not, and nothing is said.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from par_groups import ProcessGroups

from ..diagnosis.place import Place

PHASES = ("restart", "data", "step", "validation", "log", "checkpoint")
"""What the time of a run goes into. A restart is all from the making of a `Run` to its first batch."""

_PAUSE = 0.05
_DEPTH = 8
"""How many frames are looked at, innermost first: a collective's own are few."""

_COMMUNICATES = ("torch/distributed/", "_collectives.py", "par_pipeline/wire/", "context/modes/ring.py")


class Clock:
    """Times the phases of a run as they follow each other.

    Args:
        place: Is told of each phase, for the diagnosis of a run that hangs.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._taken = dict(self._seconds)
        self._phase, self._since = "restart", time.monotonic()
        place.at(None, "restart")

    def enter(self, step: int, phase: str) -> None:
        """Begins a phase, which ends the one before.

        Args:
            step: Steps done.
            phase: One of `PHASES`.
        """
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now
        self.place.at(step, phase)

    @property
    def phase(self) -> str:
        """The phase that runs."""
        return self._phase

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase since the clock was made; together they are the wall time."""
        now = time.monotonic()
        return {**self._seconds, self._phase: self._seconds[self._phase] + now - self._since}

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        total = self.seconds()
        new = {phase: seconds - self._taken[phase] for phase, seconds in total.items()}
        self._taken = total
        return new


class Exposed:
    """How long this rank's program waits in collectives of each group, sampled.

    Args:
        groups: The live groups; their names are those of the result.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._labels = {id(group): label for label, group in groups.named().items()}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Looks on while the block runs."""
        watcher = threading.Thread(target=self._watch, daemon=True, name="par-exposed")
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def seconds(self) -> Mapping[str, float]:
        """Seconds of waiting by name of the group since the beginning."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Seconds of waiting by name of the group since the last call."""
        total = dict(self._seconds)
        new = {label: seconds - self._taken.get(label, 0.0) for label, seconds in total.items()}
        self._taken = total
        return new

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_PAUSE):
            now = time.monotonic()
            label = self._waits_in(sys._current_frames().get(self._thread))
            if label is not None:
                self._seconds[label] = self._seconds.get(label, 0.0) + now - before
            before = now

    def _waits_in(self, frame: FrameType | None) -> str | None:
        """The group in whose collective a program is; None: in none."""
        is_inside = False
        for _ in range(_DEPTH):
            if frame is None:
                break
            is_inside |= any(part in frame.f_code.co_filename for part in _COMMUNICATES)
            if is_inside and (label := self._label_in(frame)) is not None:
                return label
            frame = frame.f_back
        return "other" if is_inside else None

    def _label_in(self, frame: FrameType) -> str | None:
        """The group that a frame's variables name."""
        names: dict[str, Any] = frame.f_locals
        if "par_pipeline/wire/" in frame.f_code.co_filename:
            return "pipeline"
        if "group" in names and names["group"] is None:
            return self._labels.get(id(dist.group.WORLD), "world")
        holder = names.get("self")
        candidates = (names.get("group"), names.get("pg"), getattr(holder, "_group", None))
        return next((self._labels[id(one)] for one in candidates if id(one) in self._labels), None)
