"""What orders two uses of memory: events as they were when they were recorded, and nothing else."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from par_testing import RaceError, races_seen

SIZE = 64


def module():
    return torch.get_device_module("strict")


@pytest.mark.accelerator
def test_event_recorded_before_the_work_orders_nothing():
    side, x = module().Stream(), torch.ones(SIZE, device="strict")
    side.wait_stream(module().current_stream())
    early = side.record_event()
    with module().stream(side):
        x.mul_(2)
    late = side.record_event()
    module().current_stream().wait_event(early)
    with pytest.raises(RaceError, match="mul_ on stream 1"):
        x.add_(1)
    module().current_stream().wait_event(late)
    x.add_(1)


@pytest.mark.accelerator
def test_event_recorded_again_stands_for_the_later_moment():
    side, x, y = module().Stream(), torch.ones(SIZE, device="strict"), torch.ones(SIZE, device="strict")
    side.wait_stream(module().current_stream())
    event, other = module().Event(), module().Event()
    for tensor in (x, y):
        with module().stream(side):
            tensor.mul_(2)
        event.record(side)
        if tensor is x:
            other.record(side)
    module().current_stream().wait_event(other)
    x.add_(1)
    with pytest.raises(RaceError):
        y.add_(1)
    module().current_stream().wait_event(event)
    y.add_(1)


@pytest.mark.accelerator
def test_query_in_a_loop_comes_to_an_end():
    x, asked = torch.ones(SIZE, device="strict"), 0
    module()._sleep(1_500_000)  # a millisecond
    host = torch.empty(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = module().current_stream().record_event()
    while not done.query():
        asked += 1
    assert 900 < asked < 1100  # a microsecond each
    assert host.sum() == SIZE  # and what is over may be read


@pytest.mark.accelerator
def test_fork_after_first_use_raises():
    torch.ones(SIZE, device="strict")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.ones(SIZE, device="strict")
            os.write(writer, b"nothing")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"was forked after the strict device had been used" in os.read(reader, 1000)


STREAMS, BUFFERS, EVENTS = 3, 3, 3
_stream = st.integers(0, STREAMS - 1)
_steps = st.one_of(
    st.tuples(st.just("read"), _stream, st.integers(0, BUFFERS - 1)),
    st.tuples(st.just("write"), _stream, st.integers(0, BUFFERS - 1)),
    st.tuples(st.just("record"), _stream, st.integers(0, EVENTS - 1)),
    st.tuples(st.just("wait"), _stream, st.integers(0, EVENTS - 1)),
    st.tuples(st.just("sync"), _stream, st.just(0)),
)


def conflicts(program):
    """Whether two accesses of one buffer, one of them a write, may come in either order.

    The edges of the program's graph are what a stream does one after the other, an event to whoever waits for it, and
    a stream that the host waits for to all that is issued later. Two accesses without a path between them have an
    order in one interleaving and the opposite one in another: brute force over all of them is reachability.
    """
    before = [set() for _ in program]  # for each step, all steps that come before it in every interleaving
    last, events, host = {}, {}, set()
    for number, (kind, stream, what) in enumerate(program):
        behind = set(host)
        if stream in last:
            behind |= before[last[stream]] | {last[stream]}
        if kind == "wait" and what in events:
            behind |= before[events[what]] | {events[what]}
        before[number], last[stream] = behind, number
        if kind == "record":
            events[what] = number
        if kind == "sync":
            host = host | behind
    accesses = [(n, kind, what) for n, (kind, _, what) in enumerate(program) if kind in ("read", "write")]
    return any(
        one_buffer == buffer and "write" in (one_kind, kind) and one not in before[number]
        for number, kind, buffer in accesses
        for one, one_kind, one_buffer in accesses
        if one < number
    )


@pytest.mark.accelerator(races="record")
def test_random_program_races_if_brute_force_finds_two_orders():
    streams = [module().Stream() for _ in range(STREAMS)]

    @settings(max_examples=300)
    @given(st.lists(_steps, min_size=2, max_size=12))
    def check(program):
        torch.accelerator.synchronize()
        buffers = [torch.zeros(SIZE, device="strict") for _ in range(BUFFERS)]
        torch.accelerator.synchronize()
        races_seen()
        events = [module().Event() for _ in range(EVENTS)]
        made = []
        for kind, number, what in program:
            stream = streams[number]
            with module().stream(stream):
                if kind == "read":
                    made.append(buffers[what] + 1)  # kept, so that no memory is used again
                elif kind == "write":
                    buffers[what].add_(1)
                elif kind == "record":
                    events[what].record(stream)
                elif kind == "wait":
                    stream.wait_event(events[what])
                else:
                    stream.synchronize()
        assert bool(races_seen()) == conflicts(program)

    check()
