"""What holds for every built-in schedule, whatever the sizes."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_pipeline import Costs, schedule, simulate

from ..schedule_helpers import peaks, text

# The most activations of one rank, by ranks, microbatches and chunks.
PEAKS = {
    "gpipe": lambda p, m, v: m,
    "looped_bfs": lambda p, m, v: m * v,
    "1f1b": lambda p, m, v: min(m, p),
    "interleaved": lambda p, m, v: min(m * v, 2 * (p - 1) + (v - 1) * -(-m // max(1, m // p)) + 1),
    "zb_h1": lambda p, m, v: min(m, p),
    "zb_h2": lambda p, m, v: min(m, 2 * p - 1),
    "zb_v": lambda p, m, v: min(2 * m, 2 * p),
    "v_half": lambda p, m, v: min(2 * m, p + 2),
    "v_min": lambda p, m, v: min(2 * m, 2 * -(-(p + 2) // 3)),
    "dualpipe_v": lambda p, m, v: min(2 * m, 2 * p + 1),
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_h2": 1}
LOOPED = ("interleaved", "looped_bfs")


@st.composite
def drawn(draw):
    name = draw(st.sampled_from(sorted(PEAKS)))
    ranks = draw(st.integers(1, 9))
    chunks = draw(st.integers(1, 4)) if name in LOOPED else CHUNKS.get(name, 2)
    microbatches = draw(st.integers(2 * ranks if name == "dualpipe_v" else 1, 24))
    return name, ranks, microbatches, chunks


def make(name, ranks, microbatches, chunks):
    return schedule(name, ranks, microbatches, **({"chunks": chunks} if name in LOOPED else {}))


@given(drawn())
def test_every_schedule_is_valid_and_keeps_to_its_memory(case):
    name, ranks, microbatches, chunks = case
    made = make(*case)
    made.validate()
    assert (len(made.ranks), made.stages, made.microbatches) == (ranks, ranks * chunks, microbatches)
    timeline = simulate(made)
    assert max(peaks(timeline)) <= PEAKS[name](ranks, microbatches, chunks)
    work = 3 * microbatches * chunks
    assert [timeline.busy(rank) for rank in range(ranks)] == [work] * ranks
    assert timeline.makespan >= work + ranks - 1  # the last rank cannot start earlier


@given(drawn(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5), st.integers(0, 3))
def test_no_action_starts_before_its_input_is_there_or_its_rank_is_free(
    case, forward, input_grad, weight_grad, between
):
    made = make(*case)
    timeline = simulate(made, Costs(forward, input_grad, weight_grad, between))
    ends, free = {}, [0.0] * len(made.ranks)
    for rank, action, start, end in sorted(timeline.events, key=lambda event: (event.start, event.end)):
        assert start >= free[rank]
        free[rank] = end
        ends["B" if action.op == "I" else action.op, action.stage, action.microbatch] = end
    last = made.stages - 1
    for rank, (op, stage, k), start, _ in timeline.events:
        if op == "W":
            source = ("B", stage)
        elif op == "F":
            source = ("F", stage - 1)
        else:
            source = ("F", stage) if stage == last else ("B", stage + 1)
        if source[1] >= 0:
            delay = 0 if made.rank_of(source[1]) == rank else between
            assert start >= ends[*source, k] + delay


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_a_schedule_can_be_pickled(name):
    made = schedule(name, 3, 7)
    again = pickle.loads(pickle.dumps(made))
    assert [text(actions) for actions in again.ranks] == [text(actions) for actions in made.ranks]
    assert (again.stages, again.microbatches) == (made.stages, made.microbatches)
