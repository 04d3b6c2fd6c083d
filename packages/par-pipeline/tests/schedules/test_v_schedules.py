"""ZB-V, V-Half, V-Min and DualPipe-V: two stages a rank, in a V."""

import re

import pytest

from par_pipeline import dualpipe_v, simulate, v_half, v_min, zb_v

from ..schedule_helpers import longest_span, most_idle, peaks, text, torch_actions

SIZES = [(1, 2), (2, 4), (3, 6), (4, 8), (4, 17), (5, 10), (8, 16), (7, 31)]


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (1, 1), (4, 1), (4, 3), (6, 7)])
def test_zb_v_is_torch_s(ranks, microbatches):
    ours = zb_v(ranks, microbatches)
    for rank in range(ranks):
        assert text(ours.ranks[rank]) == torch_actions("ScheduleZBVZeroBubble", rank, ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_dualpipe_v_is_torch_s(ranks, microbatches):
    ours = dualpipe_v(ranks, microbatches)
    for rank in range(ranks):
        assert text(ours.ranks[rank]) == torch_actions("ScheduleDualPipeV", rank, ranks, microbatches)


def test_the_numbers_of_zb_v_and_dualpipe_v_on_four_ranks_with_eight_microbatches():
    timeline = simulate(zb_v(4, 8))
    assert timeline.makespan == 51
    assert [timeline.span(rank) for rank in range(4)] == [48, 48, 48, 48]
    assert peaks(timeline) == [8, 8, 8, 8]
    timeline = simulate(dualpipe_v(4, 8))
    assert timeline.makespan == 51
    assert peaks(timeline) == [9, 9, 9, 9]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zb_v_has_no_bubble_with_equal_costs_once_the_pipeline_is_full(ranks):
    assert simulate(zb_v(ranks, 2 * ranks - 1)).bubble == 0
    assert simulate(zb_v(ranks, 5 * ranks + 1)).bubble == 0


def test_dualpipe_v_refuses_fewer_microbatches_than_stages():
    message = (
        "dualpipe_v on 4 ranks needs at least 8 microbatches, but there are 7; cut the batch into more, or use zb_v"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        dualpipe_v(4, 7)


@pytest.mark.parametrize(
    ("made", "ranks", "microbatches", "makespan", "peak"),
    [
        (v_half, 4, 8, 53, 6),
        (v_half, 4, 16, 101, 6),
        (v_half, 8, 16, 113, 10),
        (v_min, 4, 8, 59, 4),
        (v_min, 4, 16, 107, 4),
        (v_min, 8, 16, 123, 8),
    ],
)
def test_the_numbers_of_v_half_and_v_min(made, ranks, microbatches, makespan, peak):
    timeline = simulate(made(ranks, microbatches))
    assert timeline.makespan == makespan
    assert max(peaks(timeline)) == peak


@pytest.mark.parametrize("ranks", range(2, 20))
def test_the_bubble_of_v_min_is_four_units_a_rank_and_its_memory_a_third(ranks):
    timeline = simulate(v_min(ranks, 3 * ranks))
    assert most_idle(timeline) == 4 * ranks - (3 if ranks % 3 == 0 else 5)
    assert max(peaks(timeline)) == 2 * -(-(ranks + 2) // 3)


@pytest.mark.parametrize("ranks", range(2, 14))
def test_the_bubble_of_v_half_is_three_units_a_rank_and_its_memory_a_half(ranks):
    timeline = simulate(v_half(ranks, 3 * ranks))
    assert 3 * ranks - 7 <= most_idle(timeline) <= 3 * ranks - 5
    assert max(peaks(timeline)) <= ranks + 2


def test_less_memory_costs_more_time():
    timelines = [simulate(made(8, 32)) for made in (zb_v, v_half, v_min)]
    assert [max(peaks(each)) for each in timelines] == [16, 10, 8]
    spans = [longest_span(each) for each in timelines]
    assert spans == sorted(spans)
