"""Virtual time: what a step would take on machines that are not there.

Every rank has a clock. Operators of torch add what they would take by their arithmetic or by the bytes that they move,
whichever is more. An operation begins when all its ranks have issued it and the one before on its communicator has
ended; whoever waits for it before it has ended is exposed to it. So the numbers depend on the order in which ranks
issue and wait, and on nothing else: not on this machine, nor on when operations really complete.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .flops import flops_of
from .operation import Operation
from .options import Compute, Links
from .payloads import itemsize

MICRO = 1e6  # of seconds, Perfetto's unit


@dataclass(frozen=True)
class Span:
    """A stretch of virtual time.

    Args:
        kind: "compute", or the name of the communicator.
        name: What was done.
        begin: When, in seconds.
        end: Until when.
    """

    kind: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Times:
    """Virtual time of one rank since it was last asked for.

    Args:
        total: Seconds in all.
        computing: Seconds of operators.
        exposed: Seconds in which it waited for an operation.
        by_site: The same by the innermost call that issued the operation, such as "_gather.py:196".
        timeline: What it computed and communicated, in the order of beginnings.
    """

    total: float
    computing: float
    exposed: float
    by_site: dict[str, float]
    timeline: tuple[Span, ...]

    def trace(self, path: str | Path, rank: int = 0) -> None:
        """Writes the timeline in the form that Perfetto and chrome://tracing open.

        Args:
            path: The JSON file.
            rank: The number by which the rank is shown.
        """
        rows = {kind: number for number, kind in enumerate(dict.fromkeys(span.kind for span in self.timeline))}
        events = [
            {
                "ph": "X",
                "pid": rank,
                "tid": rows[span.kind],
                "cat": span.kind,
                "name": span.name,
                "ts": span.begin * MICRO,
                "dur": (span.end - span.begin) * MICRO,
            }
            for span in self.timeline
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def seconds_of(operation: Operation, members: Sequence[int], links: Links) -> float:
    """How long an operation takes once it has begun, as rings and trees do it.

    A ring that joins several ranks of each host goes from host to host over as many links as each host has ranks in it,
    a part of the data over each. What a batch sends and what it receives are on their way at the same time.

    Args:
        operation: As one of its ranks describes it.
        members: The ranks of the world that it joins.
        links: The machine.
    """
    hosts = Counter(rank // links.ranks_per_host for rank in members)
    latency, bandwidth = links.inside if len(hosts) == 1 else links.across
    if operation.parts:
        ways = [
            sum(part.elements * itemsize(part.dtype) for part in operation.parts if part.kind == kind)
            for kind in ("send", "recv")
        ]
        return max(ways) / bandwidth + latency
    ranks = len(members)
    if ranks == 1:
        return 0.0
    if len(hosts) > 1:
        bandwidth = min(bandwidth * min(hosts.values()), links.inside[1])
    own = sum(elements * itemsize(dtype) for elements, dtype in operation.items)
    share, around = (ranks - 1) / ranks, (ranks - len(hosts)) * links.inside[0] + (len(hosts) - 1) * links.across[0]
    if operation.name == "all_reduce":
        return 2 * share * own / bandwidth + 2 * around
    if operation.name in ("all_gather", "gather", "scatter"):
        return share * own * ranks / bandwidth + around
    if operation.name in ("reduce_scatter", "all_to_all"):
        return share * own / bandwidth + around
    return own / bandwidth + math.ceil(math.log2(ranks)) * latency


@dataclass
class Line:
    """What one rank does one after the other: all that it computes, or what it puts into one stream.

    Args:
        kind: The name of the row in which a timeline shows it.
        now: The time until which it has work, in seconds.
    """

    kind: str = "compute"
    now: float = 0.0
    worked: float = 0.0
    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Span] = field(default_factory=list)

    def work(self, name: str, seconds: float) -> None:
        """An operator takes its time."""
        if self.spans and self.spans[-1].end == self.now:
            last = self.spans.pop()  # one stretch, named by what it began with
            self.spans.append(Span(self.kind, last.name, last.begin, self.now + seconds))
        else:
            self.spans.append(Span(self.kind, name, self.now, self.now + seconds))
        self.now += seconds
        self.worked += seconds

    def wait(self, end: float, site: str) -> None:
        """Waits for what ends then."""
        self.waited[site] += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def forget(self) -> None:
        """Forgets all but the time."""
        self.worked = 0.0
        self.waited.clear()
        self.spans.clear()


class HasTime(Protocol):
    """What a rank's work is added to: a `Line`, or a stream of a device."""

    @property
    def now(self) -> float:
        """The time until which it has work, in seconds."""

    def work(self, name: str, seconds: float) -> None:
        """An operator takes its time."""

    def wait(self, end: float, site: str) -> None:
        """Waits for what ends then."""


@dataclass
class Clock:
    """The clock of one rank.

    Args:
        compute: What operators take.
        main: What the rank computes.
        beside: Other streams, such as those in which a program copies and communicates.
        current: Gives the line to which work is added: `main`, but inside a stream.
    """

    compute: Compute
    main: Line = field(default_factory=Line)
    beside: list[Line] = field(default_factory=list)
    current: Callable[[], HasTime] | None = None
    _since: float = 0.0
    _operations: list[Span] = field(default_factory=list)  # which another thread adds

    @property
    def line(self) -> HasTime:
        """The line to which work is added."""
        return self.main if self.current is None else self.current()

    @property
    def now(self) -> float:
        """The time of that line."""
        return self.line.now

    def ran(self, communicator: str, name: str, begin: float, end: float) -> None:
        """An operation has run, between these times."""
        self._operations.append(Span(communicator, name, begin, end))

    def read(self) -> Times:
        """What has passed since this was last called."""
        main, lines = self.main, [self.main, *self.beside]
        spans = [*(span for line in lines for span in line.spans), *self._operations]
        times = Times(
            total=main.now - self._since,
            computing=main.worked,
            exposed=sum(main.waited.values()),
            by_site={site: seconds for site, seconds in main.waited.items() if seconds > 0},
            timeline=tuple(sorted(spans, key=lambda span: span.begin)),
        )
        self._since = main.now
        for line in lines:
            line.forget()
        self._operations.clear()
        return times


_aten = torch.ops.aten
_COUNTED = ("aten", "fsdp")  # namespaces of operators that compute or copy
_FREE = {  # what makes or changes a tensor, and touches no element of it
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.resize_,
    _aten.set_,
}


class Meter(TorchDispatchMode):
    """Lets a clock go on with every operator of this thread, and of its backward passes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # it comes again, with the part of a DTensor that this rank has
        named = kwargs or {}
        result = func(*args, **named)
        if any(issubclass(kind, FakeTensor) for kind in types):
            return result  # torch only asks for a shape
        if func.namespace in _COUNTED and not func.is_view and func._overloadpacket not in _FREE:
            self._clock.line.work(func._opname, self._seconds(func, args, named, result))
        return result

    def _seconds(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> float:
        compute = self._clock.compute
        if func.name() == "fsdp::all_gather_copy_in":  # into a part of a buffer for all ranks
            inputs: list[Tensor] = args[0]
            return 2 * sum(tensor.nbytes for tensor in inputs) / compute.memory
        tensors = [leaf for leaf in tree_leaves((args, named, result)) if isinstance(leaf, Tensor)]
        moved = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        return max(flops_of(func, args, named, result) / compute.flops, moved / compute.memory)
