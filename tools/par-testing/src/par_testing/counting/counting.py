"""Count what is communicated, so that one collective too many fails a test."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from .c10d_ops import communications
from .volume import received_per_rank

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Collective:
    """One communication that this rank took part in.

    Args:
        op: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier.
        ranks: The global ranks of the group, in the group's order.
        elements: The size of the full tensor of the operation: what an all-gather has gathered, what goes into a
            reduce-scatter, what this rank puts into an all-to-all. 0 for a barrier.
        bytes: The size of that tensor in bytes.
        dtype: The elements' type.
    """

    op: str
    ranks: tuple[int, ...]
    elements: int
    bytes: int
    dtype: "torch.dtype"


class Counted:
    """Communication that `count_collectives` has counted so far. Each count can be restricted to one `op`."""

    def __init__(self) -> None:
        self._events: list[Collective] = []

    @property
    def events(self) -> tuple[Collective, ...]:
        """Every communication in the order in which this rank issued it."""
        return tuple(self._events)

    def calls(self, op: str | None = None) -> int:
        """How many there were."""
        return len(self._of(op))

    def elements(self, op: str | None = None) -> int:
        """The sum of their full sizes, in elements."""
        return sum(event.elements for event in self._of(op))

    def bytes(self, op: str | None = None) -> int:
        """The sum of their full sizes, in bytes."""
        return sum(event.bytes for event in self._of(op))

    def received(self, op: str | None = None) -> Fraction:
        """Elements received by one rank, by the conventions of `received_per_rank`."""
        return sum(
            (received_per_rank(event.op, event.elements, len(event.ranks)) for event in self._of(op)), Fraction(0)
        )

    def _of(self, op: str | None) -> list[Collective]:
        return [event for event in self._events if op is None or event.op == op]

    def _add(self, events: Iterable[Collective]) -> None:
        self._events.extend(events)


_threads = threading.local()
"""The counters of each thread, and whether an operator of torch's that they have seen is under way."""


def report(op: str, ranks: Sequence[int], sizes: Iterable[tuple[int, "torch.dtype"]]) -> None:
    """Tell the counters of this thread of a communication that goes past torch's dispatcher.

    Backward of a device runs in a thread of autograd, which takes over the modes of the thread that called it.

    Args:
        op: What it is, as in `Collective`.
        ranks: The global ranks of the group.
        sizes: The elements of its full tensors of each dtype, and the dtype.
    """
    if getattr(_threads, "inside", 0):
        return
    events = [Collective(op, tuple(ranks), elements, elements * dtype.itemsize, dtype) for elements, dtype in sizes]
    modes = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _CountingMode))
    for counted in getattr(_threads, "counters", []) or [mode.counted for mode in modes]:
        counted._add(events)


@contextmanager
def count_collectives() -> Iterator[Counted]:
    """Count the communication that this thread issues inside the `with` block, backward and DDP's reducer included.

    Work of threads that the code itself starts is not seen.
    """
    counted = Counted()
    counters = _threads.__dict__.setdefault("counters", [])
    counters.append(counted)
    try:
        with _CountingMode(counted):
            yield counted
    finally:
        counters.remove(counted)


class _CountingMode(TorchDispatchMode):
    """Below autograd, every communication is an operator of c10d or _c10d_functional that passes by here."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor goes first: what it communicates inside then comes by as plain tensors
        arguments = kwargs or {}
        events = [
            Collective(seen.op, seen.ranks, seen.elements, seen.elements * seen.dtype.itemsize, seen.dtype)
            for seen in communications(func, args, arguments)
        ]
        self.counted._add(events)
        if not events:
            return func(*args, **arguments)
        _threads.inside = getattr(_threads, "inside", 0) + 1  # what it calls inside has been counted
        try:
            return func(*args, **arguments)
        finally:
            _threads.inside -= 1
