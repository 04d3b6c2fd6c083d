"""Virtual time: what a step would take on machines that are not there.

Every rank has a clock. Operators of torch add what they would take by their arithmetic or by the bytes that they move,
whichever is more. An operation begins when all its ranks have issued it and the one before on its communicator has
ended; whoever waits for it before it has ended is exposed to it. So the numbers depend on the order in which ranks
issue and wait, and on nothing else: not on this machine, nor on when operations really complete.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

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

    Args:
        operation: As one of its ranks describes it.
        members: The ranks of the world that it joins.
        links: The machine.
    """
    hosts = {rank // links.ranks_per_host for rank in members}
    latency, bandwidth = links.inside if len(hosts) == 1 else links.across
    ranks = len(members)
    if operation.parts:
        sizes = [part.elements * itemsize(part.dtype) for part in operation.parts]
        return sum(sizes) / bandwidth + latency
    own = sum(elements * itemsize(dtype) for elements, dtype in operation.items)
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    if operation.name == "all_reduce":
        return 2 * share * own / bandwidth + 2 * (ranks - 1) * latency
    if operation.name in ("all_gather", "gather", "scatter"):
        return share * own * ranks / bandwidth + (ranks - 1) * latency
    if operation.name in ("reduce_scatter", "all_to_all"):
        return share * own / bandwidth + (ranks - 1) * latency
    return own / bandwidth + math.ceil(math.log2(ranks)) * latency


@dataclass
class Clock:
    """The clock of one rank.

    Args:
        compute: What operators take.
    """

    compute: Compute
    now: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    _since: float = 0.0
    _by_site: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _spans: list[Span] = field(default_factory=list)
    _operations: list[Span] = field(default_factory=list)  # which another thread adds

    def work(self, name: str, seconds: float) -> None:
        """An operator takes its time."""
        if self._spans and self._spans[-1].kind == "compute" and self._spans[-1].end == self.now:
            last = self._spans.pop()  # one stretch, named by what it began with
            self._spans.append(Span("compute", last.name, last.begin, self.now + seconds))
        else:
            self._spans.append(Span("compute", name, self.now, self.now + seconds))
        self.now += seconds
        self.computing += seconds

    def wait(self, end: float, site: str) -> None:
        """Waits for an operation that ends then."""
        exposed = max(0.0, end - self.now)
        self.exposed += exposed
        self._by_site[site] += exposed
        self.now = max(self.now, end)

    def ran(self, communicator: str, name: str, begin: float, end: float) -> None:
        """An operation has run, between these times."""
        self._operations.append(Span(communicator, name, begin, end))

    def read(self) -> Times:
        """What has passed since this was last called."""
        times = Times(
            total=self.now - self._since,
            computing=self.computing,
            exposed=self.exposed,
            by_site={site: seconds for site, seconds in self._by_site.items() if seconds > 0},
            timeline=tuple(sorted([*self._spans, *self._operations], key=lambda span: span.begin)),
        )
        self._since, self.computing, self.exposed = self.now, 0.0, 0.0
        self._by_site.clear()
        self._spans.clear()
        self._operations.clear()
        return times


class Meter(TorchDispatchMode):
    """Lets a clock go on with every operator of this thread, and of its backward passes."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func.namespace == "aten" and not func.is_view:
            self._clock.work(func._opname, self._seconds(func, args, named, result))
        return result

    def _seconds(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> float:
        compute = self._clock.compute
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **named, out_val=result) if count is not None else 0
        tensors = [leaf for leaf in tree_leaves((args, named, result)) if isinstance(leaf, Tensor)]
        moved = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        return max(flops / compute.flops, moved / compute.memory)
