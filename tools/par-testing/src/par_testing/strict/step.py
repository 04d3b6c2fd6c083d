"""What a training step may not do: let the host wait for a device, exchange Python objects, connect communicators."""

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .options import Objects
from .sites import functions, is_of_objects

_WAITS = {
    torch.ops.aten._local_scalar_dense.default: "item() or bool()",
    torch.ops.aten.nonzero.default: "nonzero()",
    torch.ops.aten.masked_select.default: "masked_select()",
    torch.ops.aten.unique_consecutive.default: "unique_consecutive()",
    torch.ops.aten._unique2.default: "unique()",
    torch.ops.aten.equal.default: "torch.equal()",
}
"""Operators for which the host needs what a device has computed."""

_threads = threading.local()
_latest: list[Any] = [None]  # the step of the program's thread, for which autograd's threads work


class Seen:
    """What a step did that is refused, at the places where it is allowed.

    Attributes:
        sites: What was done and where, such as "item() or bool() in clip.py:agree", in order.
    """

    def __init__(self) -> None:
        self.sites: list[str] = []


class HostWaitError(AssertionError):
    """A step did what it may not; the message names what and where."""


class FirstUseError(AssertionError):
    """A communicator was used for the first time within `no_first_use`; the message names it and where."""


@contextmanager
def step(allow: Collection[str] = ()) -> Iterator[Seen]:
    """Refuses, on this rank, what costs a step its overlap on GPUs.

    That is: reading a number (`.item()`, `.tolist()`, `bool(tensor)`), asking how many there are (`nonzero`), object
    collectives, new communicators and the first use of a communicator, of strict groups.

    Args:
        allow: Functions in which it may be done all the same, as "file.py:function".

    Raises:
        HostWaitError: Something of that was done elsewhere.
    """
    seen = Seen()
    before = _step_around()
    _threads.step = (seen, frozenset(allow))
    _latest[:] = [_threads.step]
    tolist = Tensor.tolist
    Tensor.tolist = _tolist_that_is_seen(tolist)  # type: ignore[method-assign]  # the dispatcher never sees it
    try:
        with _Watch():  # type: ignore[no-untyped-call]
            yield seen
    finally:
        Tensor.tolist = tolist  # type: ignore[method-assign]
        _threads.step = before
        _latest[:] = [before]


@contextmanager
def no_first_use() -> Iterator[None]:
    """Refuses, on this rank, the first operation of any communicator, and nothing else.

    NCCL connects a communicator when it is first used. That is a meeting of the hosts of all its ranks. Inside a step
    it may wait for a rank that waits for this one, so a program is to use each communicator once before its first step.

    Raises:
        FirstUseError: A communicator of strict groups was used for the first time.
    """
    before = getattr(_threads, "connected", False)
    _threads.connected = True
    try:
        yield
    finally:
        _threads.connected = before


def check_first_use(communicator: str) -> None:
    """Called before the first operation of a communicator.

    Raises:
        HostWaitError: There is a step around, which does not allow it here.
        FirstUseError: It is within `no_first_use`.
    """
    if getattr(_threads, "connected", False):
        places = " < ".join([*functions()][:3])
        raise FirstUseError(
            f"the first operation of {communicator}, at {places}, where all communicators should be connected; use it "
            "once before the first step"
        )
    refuse_in_step(f"the first operation of {communicator}")


def refuse_in_step(what: str) -> None:
    """Called where something is done that a step may not.

    Raises:
        HostWaitError: There is a step around, which does not allow it here.
    """
    around = _step_around()
    if around is None:
        return
    seen, allow = around
    places = [*functions()]
    where = next((place for place in places if place in allow), None)
    if where is None:
        raise HostWaitError(f"{what} in a step, at {' < '.join(places[:3])}; the host would wait for the device there")
    seen.sites.append(f"{what} in {where}")


def _step_around() -> Any:
    """The step that is around this thread; on a thread of autograd's, around the backward pass that it works for."""
    of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    return _latest[0] if of_autograd else getattr(_threads, "step", None)


def check_objects(objects: Objects) -> None:
    """Called by each collective: refuses those of Python objects where they may not be.

    Raises:
        HostWaitError: One of Python objects is under way in a step, or anywhere if `objects` is "refuse".
    """
    if objects == "refuse" and is_of_objects():
        places = " < ".join([*functions()][:3])
        raise HostWaitError(f"a collective of Python objects at {places}: Strict(objects='refuse'); send a tensor")
    if objects == "setup" and _step_around() is not None and is_of_objects():
        refuse_in_step("a collective of Python objects")


class _Watch(TorchDispatchMode):
    """Sees every operator of this thread, and of its backward passes."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WAITS:
            refuse_in_step(_WAITS[func])
        if func is torch.ops.aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            refuse_in_step("a mask as an index")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Tensor | None) -> bool:
    """Whether the size of what it picks is known only when it has been computed."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _tolist_that_is_seen(tolist: Any) -> Any:
    def seen(tensor: Tensor) -> Any:
        refuse_in_step("tolist()")
        return tolist(tensor)

    return seen
