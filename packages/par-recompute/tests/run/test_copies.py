"""Which stream waits for which before a copy begins, and how long memory is held."""

import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from par_recompute.run.copies import HostCopies


class Recorded(TorchDispatchMode):
    """Streams that write down what they do, in the place of torch.cuda; an event has passed when a test says so."""

    def __init__(self):
        super().__init__()
        self.log, self.passed, self.names = [], False, iter(("out", "into"))
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


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def wait_stream(self, other):
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.streams.log.append(f"{self.name} waits for the event of {event.name}")

    def record_event(self):
        return Event(self.streams, self.name)


class Event:
    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def query(self):
        return self.streams.passed


def test_a_copy_waits_for_whoever_has_its_memory_and_its_elements():
    streams = Recorded()
    copies = HostCopies(streams)
    with streams:
        stored = copies.store(torch.ones(3))
        assert streams.log[-2:] == ["out waits for computing", "out: copy_"]
        streams.log.clear()
        copies.wait(stored)
        assert streams.log == ["computing waits for the event of out"]
        streams.log.clear()
        copies.fetch(stored)
        copies.fetch(stored)  # once is enough
        assert streams.log == [
            "computing: empty_like",  # its memory
            "into waits for computing",
            "into waits for the event of out",
            "into: copy_",
        ]
        streams.log.clear()
        assert torch.equal(copies.load(stored), torch.ones(3))
        assert streams.log[0] == "computing waits for the event of into"


def test_memory_that_a_copy_fills_is_held_until_it_has_come_though_nobody_wants_it():
    streams = Recorded()
    copies = HostCopies(streams)
    with streams:
        stored = copies.store(torch.ones(3))
        copies.fetch(stored)
        coming = weakref.ref(stored.coming[0])
        del stored
        assert coming() is not None
        copies.fetch(copies.store(torch.ones(3)))
        assert coming() is not None
        streams.passed = True
        copies.fetch(copies.store(torch.ones(3)))
        assert coming() is None
        stored = copies.store(torch.ones(3))
        taken = weakref.ref(copies.load(stored))
        assert taken() is None  # what was taken is its user's


def test_tensors_of_the_cpu_are_there_already():
    assert not HostCopies().takes(torch.ones(3))
    assert HostCopies().takes(torch.ones(3, device="meta"))
