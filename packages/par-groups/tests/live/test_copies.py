"""Which stream waits for which before a copy begins, and how long memory is held."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from par_groups import HostCopies, copy_to_device


class Recorded(TorchDispatchMode):
    """Streams that record their work, in the place of torch.cuda."""

    def __init__(self):
        super().__init__()
        self.log, self.names = [], iter(("out", "into"))
        self.current = self.computing = Stream(self, "computing")

    def Stream(self, device):
        return Stream(self, next(self.names))

    def current_stream(self, device):
        return self.computing

    @contextmanager
    def stream(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = self.computing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name in {"copy_", "empty", "empty_like"}:
            self.log.append(f"{self.current.name}: {name}")
        return func(*args, **(kwargs or {}))

    def logged(self):
        """Return the log since the last call."""
        log, self.log = self.log, []
        return log


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.streams.log.append(f"{self.name} waits for the event of {event}")

    def record_event(self):
        return self.name


@pytest.fixture
def streams():
    with Recorded() as streams:
        yield streams


def test_copy_waits_for_the_memory_and_the_elements(streams):
    copy = HostCopies(streams).store(torch.ones(3))
    assert streams.logged()[-2:] == ["out waits for computing", "out: copy_"]
    copy.release()
    copy.release()
    assert streams.logged() == ["computing waits for the event of out"]
    copy.fetch()
    copy.fetch()
    assert streams.logged() == [
        "computing: empty_like",  # its memory belongs to the computing stream
        "into waits for computing",
        "into waits for the event of out",
        "into: copy_",
    ]
    assert torch.equal(copy.load(), torch.ones(3))
    assert streams.log[0] == "computing waits for the event of into"


def test_copy_of_a_tensor_on_the_device_is_loaded_without_copies(streams):
    tensor = torch.ones(3)
    copy = HostCopies(streams).hold(tensor)
    copy.fetch()
    assert copy.load() is tensor
    assert streams.logged() == []
    copy.send()
    copy.send()
    copy.fetch()
    assert copy.load() is tensor
    assert streams.logged() == ["computing: empty", "out waits for computing", "out: copy_"]


def test_dropped_copy_out_is_waited_for_before_its_memory_is_free(streams):
    tensor = torch.ones(3)
    copy, alive = HostCopies(streams).store(tensor), weakref.ref(tensor)
    del tensor
    assert alive() is not None
    streams.logged()
    del copy
    assert alive() is None
    assert streams.logged() == ["computing waits for the event of out"]


def test_dropped_copy_back_is_waited_for_before_its_memory_is_free(streams):
    copy = HostCopies(streams).store(torch.ones(3))
    copy.release()
    copy.fetch()
    alive = weakref.ref(copy._returning)
    streams.logged()
    del copy
    assert alive() is None
    assert streams.logged() == ["computing waits for the event of into"]


def test_loaded_tensor_is_owned_by_its_user(streams):
    copy = HostCopies(streams).store(torch.ones(3))
    copy.release()
    alive = weakref.ref(copy.load())
    assert alive() is None
    assert torch.equal(copy.load(), torch.ones(3))  # such as for a retained graph
    streams.logged()
    del copy
    assert streams.logged() == []


def test_tensors_of_the_cpu_are_not_copied():
    assert not HostCopies().takes(torch.ones(3))
    assert HostCopies().takes(torch.ones(3, device="meta"))
    tensor = torch.ones(3)
    assert copy_to_device(tensor, torch.device("cpu")) is tensor
