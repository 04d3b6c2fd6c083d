"""Virtual time of the device, as tests read it, and what the host adds to it."""

import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ..strict.clock import Span, Times
from .options import NAME
from .state import state

P = ParamSpec("P")
R = TypeVar("R")

_before = [0.0]  # the time at which it was last read
_PATIENCE = 60.0
"""Real seconds for which a reader of times waits for jobs in other threads."""


def device_times() -> Times:
    """Return virtual time of this process's device since it was last read, or since the device was made.

    `total` is up to the end of all that this thread has given to streams, and of this thread. What other threads have
    issued counts as soon as this thread or its streams wait for it. `exposed` is the time for which the default stream
    of the first device waited for events, and `by_site` divides it by the place that made it wait. The timeline has a
    row for each stream and engine.

    Functions of `own_host_time` that have been made must have returned, so this waits for them.

    Raises:
        RuntimeError: The process has no strict device, or such a function does not return.
    """
    if state.native is None:
        raise RuntimeError(f'this process has no device "{NAME}"; mark the test with @pytest.mark.accelerator')
    wait_for_jobs()
    host, streams = state.native.read_times()
    now = max(host, *(end for end, _ in streams))
    spans, later = [], []
    for row, call in state.calls:
        times = call.times()
        if times is None:
            later.append((row, call))
        else:
            spans.append(Span(row, call.name, *times))
    spans.sort(key=lambda span: span.begin)
    state.calls.clear()
    state.calls.extend(later)
    waited: dict[str, float] = streams[0][1]
    _before[0], since = now, _before[0]
    return Times(
        total=now - since,
        computing=sum(span.end - span.begin for span in spans if span.kind.endswith(" compute")),
        exposed=sum(waited.values()),
        by_site=waited,
        timeline=tuple(spans),
    )


def host_works(size: int) -> None:
    """Let the host's own arithmetic take its virtual time, such as that of an optimizer's step on the CPU.

    Args:
        size: Bytes that it reads and writes.
    """
    state.native.host_works(size / state.rules.costs.host)


def own_host_time(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that another thread may call once, in a virtual time of that thread's own.

    It begins at the present of the thread that calls `own_host_time`, and when the other thread's earlier functions
    have ended. Use it in front of a submit, as in `pool.submit(own_host_time(job))`: times then are the same in every
    run, for they depend on no thread's real speed. The threads of autograd share the time of the main thread.

    Args:
        function: Function that issues work for the device.
    """
    submitted = state.native.submit_job()

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> R:
        state.native.begin_job(submitted)
        try:
            return function(*args, **named)
        finally:
            state.native.end_job()

    return run


def host_moment() -> object:
    """Return the present of this thread in virtual time, for a thread that is made to wait for it."""
    return state.native.host_now()


def wait_until_moment(moment: object) -> None:
    """Let this thread go on no earlier than a moment of another thread's time.

    A lock or a `Future` makes a thread wait in real time only. Take the moment in the other thread before it notifies
    this one, and call this when the wait has ended, so that the wait also takes virtual time.

    Args:
        moment: What `host_moment` has returned in the other thread.
    """
    state.native.host_waits_until(moment)


def wait_for_jobs() -> None:
    """Wait until functions of `own_host_time` have returned, for what they still issue may come earlier.

    Raises:
        RuntimeError: One of them has not returned after a minute.
    """
    deadline = time.monotonic() + _PATIENCE
    while state.native.jobs():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"a function of own_host_time() has not returned after {_PATIENCE:.0f} s; let it return before times "
                "of the device are read or a collective is issued"
            )
        time.sleep(1e-4)


def waits_seen() -> dict[tuple[str, str], int]:
    """Return how often the host waited for the device since this was last called, by what it did and where."""
    seen = dict(state.waits)
    state.waits.clear()
    return seen


def pageable_seen() -> dict[str, int]:
    """Return the number of `non_blocking` copies from or to pageable memory since the last call, by call site."""
    seen = dict(state.pageable)
    state.pageable.clear()
    return seen


def races_seen() -> list[str]:
    """Return the race messages since the last call. The device must have `races="record"`."""
    seen = list(state.races)
    state.races.clear()
    return seen
