import json
import subprocess
import sys
import time

import pytest

from par_pipeline import Costs, Event, interleaved, one_f_one_b, simulate, zb_v

from ..schedule_helpers import most_idle, parsed, text


def test_events_are_those_of_the_schedule_in_its_order():
    schedule = interleaved(3, 5)
    events = list(simulate(schedule).events)
    for rank, actions in enumerate(schedule.ranks):
        assert text(event.action for event in events if event.rank == rank) == text(actions)


def test_a_small_step_by_hand():
    schedule = parsed("0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1")
    timeline = simulate(schedule, Costs(forward=[2, 3], input_grad=[4, 5], weight_grad=1, communication=0.5))
    spans = [(rank, str(action), start, end) for rank, action, start, end in timeline.events]
    assert sorted(spans, key=lambda span: (span[0], span[2])) == [
        (0, "0F0", 0, 2),
        (0, "0F1", 2, 4),
        (0, "0B0", 11, 16),  # waits for 1I0, not for 1W0
        (0, "0B1", 21, 26),
        (1, "1F0", 2.5, 5.5),
        (1, "1I0", 5.5, 10.5),
        (1, "1W0", 10.5, 11.5),
        (1, "1F1", 11.5, 14.5),
        (1, "1B1", 14.5, 20.5),
    ]
    assert (timeline.makespan, timeline.span(1), timeline.busy(1), timeline.idle(1)) == (26, 18, 18, 0)
    assert (timeline.idle(0), timeline.bubble) == (12, 1 - 18 / 26)


def test_stages_on_one_rank_hand_over_without_communication():
    timeline = simulate(zb_v(1, 3), Costs(communication=100.0))
    assert timeline.makespan == 18


def test_communication_delays_every_edge_between_ranks():
    timeline = simulate(one_f_one_b(2, 1), Costs(communication=[10, 1000]))  # nothing follows the last stage
    assert timeline.makespan == 1 + 10 + 1 + 2 + 10 + 2


def test_ranks_that_wait_for_ever_are_an_error_that_names_what_never_runs():
    message = (
        r"rank 0 waits at position 1, 0B0, for the backward of stage 1, microbatch 0, on rank 1; rank 1 never runs it"
    )
    with pytest.raises(ValueError, match=message):
        simulate(parsed("0F0 0B0", "1F0"))


def test_64_ranks_with_512_microbatches_are_simulated_at_once():
    start = time.process_time()
    simulate(one_f_one_b(64, 512))
    assert time.process_time() - start < 60  # seconds of this process; 0.08 measured, hours by the square


def test_no_action_is_kept():
    """The peak of memory does not grow with the microbatches: 20 times as many, and less than 0.4 MB more."""
    code = """
import json, tracemalloc
from par_pipeline import one_f_one_b, simulate, v_min, zb_h1
peaks = []
for made in (one_f_one_b, zb_h1, v_min):
    for microbatches in (20, 400):
        schedule = made(10, microbatches)
        tracemalloc.start()
        simulate(schedule)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
print(json.dumps(peaks))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    few, many = json.loads(done.stdout)[::2], json.loads(done.stdout)[1::2]
    assert all(after - before < 4e5 for before, after in zip(few, many, strict=True)), (few, many)


def test_an_event_says_who_what_and_when():
    event = next(iter(simulate(one_f_one_b(1, 1)).events))
    assert event == Event(0, ("F", 0, 0), 0.0, 1.0)


def test_a_longer_pipeline_waits_longer():
    idle = [most_idle(simulate(one_f_one_b(ranks, 32))) for ranks in (1, 2, 4, 8)]
    assert idle == [0, 3, 9, 21]
