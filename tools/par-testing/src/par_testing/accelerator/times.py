"""Virtual time of the device, as tests read it, and what the host adds to it."""

from ..strict.clock import Times
from .options import NAME
from .state import state

_before = [0.0]  # the time at which it was last read


def device_times() -> Times:
    """Return virtual time of this process's device since it was last read, or since the device was made.

    `total` is up to the end of all that streams have been given and of the host. `exposed` is the time for which the
    default stream of the first device waited for events, and `by_site` divides it by the place that made it wait. The
    timeline has a row for each stream and engine.

    Raises:
        RuntimeError: The process has no strict device.
    """
    if state.native is None:
        raise RuntimeError(f'this process has no device "{NAME}"; mark the test with @pytest.mark.accelerator')
    host, _, streams = state.native.read_times()
    now = max(host, *(end for end, _ in streams))
    spans = sorted(state.spans, key=lambda span: span.begin)
    waited: dict[str, float] = streams[0][1]
    times = Times(
        total=now - _before[0],
        computing=sum(span.end - span.begin for span in spans if span.kind.endswith(" compute")),
        exposed=sum(waited.values()),
        by_site=waited,
        timeline=tuple(spans),
    )
    _before[0] = now
    state.spans.clear()
    return times


def host_works(size: int) -> None:
    """Let the host's own arithmetic take its virtual time, such as that of an optimizer's step on the CPU.

    Args:
        size: Bytes that it reads and writes.
    """
    state.native.host_works(size / state.rules.costs.host)


def own_host_time() -> None:
    """Give this thread a virtual time of its own, from the present of the main thread.

    Call it first in a thread that issues work beside the main one. The threads of autograd share the main one's time.
    """
    state.native.own_host_time()


def waits_seen() -> dict[tuple[str, str], int]:
    """Return how often the host waited for the device since this was last called, by what it did and where."""
    seen = dict(state.waits)
    state.waits.clear()
    return seen


def pageable_seen() -> dict[str, int]:
    """Return how many non_blocking copies of memory that is not pinned there were since the last call, by where."""
    seen = dict(state.pageable)
    state.pageable.clear()
    return seen


def races_seen() -> list[str]:
    """Return the messages of races since this was last called, of a device with `races="record"`."""
    seen = list(state.races)
    state.races.clear()
    return seen
