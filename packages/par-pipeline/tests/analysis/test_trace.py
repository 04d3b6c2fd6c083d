import json

from par_pipeline import Costs, Timeline, interleaved, simulate


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
