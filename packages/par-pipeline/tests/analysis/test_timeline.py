import pytest

from par_pipeline import Action, Event, Timeline, simulate, zb_h1, zb_v

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
