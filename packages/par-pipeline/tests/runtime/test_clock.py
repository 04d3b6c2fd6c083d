"""Moments of a step, on the clock of what runs it."""

from time import perf_counter

import pytest
import torch
from torch import nn

from par_pipeline.runtime import clock as _clock

BEHIND = 0.3  # seconds


class Stream:
    """A GPU's stream that is behind its host, and the host's clock, which goes on where the host waits."""

    def __init__(self):
        self.now = 100.0

    def event(self, device, *, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    """A GPU's, on a stream that is behind its host."""

    def __init__(self, stream):
        self.stream, self.waited = stream, False

    def record(self, stream):
        assert stream is self.stream
        self.at = self.stream.now + BEHIND

    def synchronize(self):
        self.stream.now = max(self.stream.now, self.at)
        self.waited = True

    def elapsed_time(self, other):
        assert other.waited
        return 1e3 * (other.at - self.at)


def test_stages_on_a_cpu_are_timed_by_the_host():
    clock = _clock.clock_of([nn.Linear(2, 2)])
    before, moment, after = perf_counter(), clock.now(), perf_counter()
    assert before <= clock.seconds([moment])[0] <= after


def test_a_stream_s_moments_are_when_it_comes_to_them_and_only_the_question_waits(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch, "Event", stream.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(_clock, "perf_counter", lambda: stream.now)
    clock = _clock.clock_of([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)])
    assert isinstance(clock, _clock.HostClock)
    clock = _clock.StreamClock(torch.device("cuda"))
    moments = []
    for now in (100.0, 102.0):
        stream.now = now
        moments.append(clock.now())
        assert stream.now == now
    assert clock.seconds(moments) == pytest.approx([100.0 + BEHIND, 102.0 + BEHIND])
    assert stream.now == 102.0 + BEHIND
