"""Moments of a step, on the clock of what runs it."""

from time import perf_counter, sleep

import pytest
import torch
from torch import nn

from par_pipeline.runtime import clock as _clock

BEHIND = 0.3  # seconds


class Event:
    """A GPU's, on a stream that is behind its host."""

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.waited = False

    def record(self):
        self.at = perf_counter() + BEHIND

    def synchronize(self):
        sleep(max(0.0, self.at - perf_counter()))
        self.waited = True

    def elapsed_time(self, other):
        assert other.waited
        return 1e3 * (other.at - self.at)


def test_stages_on_a_cpu_are_timed_by_the_host():
    clock = _clock.clock_of([nn.Linear(2, 2)])
    before, moment, after = perf_counter(), clock.now(), perf_counter()
    assert before <= clock.seconds([moment])[0] <= after


def test_a_stream_s_moments_are_when_it_comes_to_them_and_only_the_question_waits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = _clock.StreamClock()
    before = perf_counter()
    moments = [clock.now(), clock.now()]
    assert perf_counter() - before < BEHIND
    assert clock.seconds(moments) == pytest.approx([each.at for each in moments], abs=0.1)
    assert perf_counter() - before > BEHIND
