import json

import pytest

from par_pipeline import Action, Costs, Event, Timeline, interleaved, simulate, zb_h1, zb_v

from ..schedule_helpers import peaks


@pytest.mark.parametrize("made", [zb_h1, zb_v])
def test_recorded_events_give_what_the_simulator_gives(made):
    simulated = simulate(made(4, 9))
    later = [event._replace(start=event.start + 1000, end=event.end + 1000) for event in simulated.events]
    recorded = Timeline(later[::-1])
    assert (recorded.start, recorded.makespan, recorded.bubble) == (1000, simulated.makespan, simulated.bubble)
    assert peaks(recorded) == peaks(simulated)
    for rank in range(4):
        assert recorded.span(rank) == simulated.span(rank)
        assert recorded.idle(rank) == simulated.idle(rank)


def test_the_bubble_is_what_the_busiest_rank_waits_in_the_longest_span():
    events = [
        Event(0, Action("F", 0, 0), 5.0, 6.0),
        Event(1, Action("F", 1, 0), 6.0, 9.0),
        Event(0, Action("B", 0, 0), 12.0, 15.0),
    ]
    timeline = Timeline(events)
    assert repr(timeline) == "Timeline(2 ranks, makespan 10, bubble 60.0%)"
    assert (timeline.span(0), timeline.busy(0), timeline.idle(0), timeline.peak(0)) == (10, 4, 6, 1)
    assert (timeline.span(1), timeline.busy(1), timeline.idle(1), timeline.peak(1)) == (3, 3, 0, 1)


def test_events_of_all_ranks_are_needed():
    with pytest.raises(ValueError, match="a timeline needs events"):
        Timeline([])
    with pytest.raises(ValueError, match="rank 0 of 2 has no events; gather those of all ranks"):
        Timeline([Event(1, Action("F", 1, 0), 0.0, 1.0)])


def test_a_step_that_takes_no_time_has_no_bubble():
    assert Timeline([Event(0, Action("F", 0, 0), 1.0, 1.0)]).bubble == 0


def test_a_trace_has_a_named_track_a_rank_and_an_event_an_action(tmp_path):
    timeline = simulate(interleaved(3, 4), Costs(forward=2.0))
    timeline.trace(tmp_path / "step.json")
    listed = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in listed if each["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    events = [each for each in listed if each["ph"] == "X"]
    assert len(events) == 3 * 2 * 4 * 2
    first = next(each for each in events if each["name"] == "1F0")
    assert (first["tid"], first["ts"], first["dur"], first["cat"]) == (1, 2e6, 2e6, "forward")
    assert first["args"] == {"stage": 1, "microbatch": 0}


def test_a_recorded_trace_starts_at_zero(tmp_path):
    events = [
        event._replace(start=event.start + 77, end=event.end + 77) for event in simulate(interleaved(2, 2)).events
    ]
    Timeline(events).trace(tmp_path / "step.json")
    listed = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert min(each["ts"] for each in listed if each["ph"] == "X") == 0
