import itertools

import pytest

from par_pipeline import interleaved, one_f_one_b, simulate

from ..schedule_helpers import most_idle, peaks, text, torch_actions, torch_one_f_one_b

FIRST = "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
LAST = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
INTERLEAVED = (
    "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 4B5 4B6 4B7 "
    "0B4 0B5 0B6 0B7"
)


def test_the_order_of_four_ranks_and_eight_microbatches():
    schedule = one_f_one_b(4, 8)
    assert text(schedule.ranks[0], stage=False) == FIRST
    assert text(schedule.ranks[3], stage=False) == LAST
    timeline = simulate(schedule)
    assert timeline.makespan == 33
    assert most_idle(timeline) == 9
    assert peaks(timeline) == [4, 3, 2, 1]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (5, 7)])
def test_it_is_torch_s_but_for_the_last_rank_where_torch_s_is_wrong(ranks, microbatches):
    ours = [text(actions) for actions in one_f_one_b(ranks, microbatches).ranks]
    theirs = torch_one_f_one_b(ranks, microbatches)
    assert ours[:-1] == theirs[:-1]
    assert theirs[-1].startswith(f"{ranks - 1}F1 {ranks - 1}B0")  # it never runs F0


def test_the_interleaved_order_of_four_ranks_eight_microbatches_and_two_chunks():
    schedule = interleaved(4, 8, 2)
    assert text(schedule.ranks[0]) == INTERLEAVED
    timeline = simulate(schedule)
    assert timeline.makespan == 57
    assert most_idle(timeline) == 9
    assert peaks(timeline) == [11, 9, 7, 5]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 3), (4, 8), (4, 10), (3, 15), (8, 16)])
def test_the_interleaved_form_is_torch_s_where_torch_has_one(ranks, microbatches, chunks):
    ours = interleaved(ranks, microbatches, chunks)
    for rank in range(ranks):
        expected = torch_actions("ScheduleInterleaved1F1B", rank, ranks, microbatches, chunks)
        assert text(ours.ranks[rank]) == expected


def test_one_chunk_is_one_f_one_b_with_twice_the_warm_up():
    assert text(interleaved(4, 8, 1).ranks[3]) == text(one_f_one_b(4, 8).ranks[3])
    assert peaks(simulate(interleaved(4, 8, 1))) == [7, 5, 3, 1]


def test_any_number_of_microbatches_is_interleaved_without_deadlock_and_waits_little():
    sizes = list(itertools.product(range(1, 8), range(1, 34), (1, 2, 3)))
    assert len(sizes) == 693
    for ranks, microbatches, chunks in sizes:
        timeline = simulate(interleaved(ranks, microbatches, chunks))  # raises in a deadlock
        if microbatches >= ranks:
            assert most_idle(timeline) <= 3 * (ranks - 1), (ranks, microbatches, chunks)


def test_groups_that_differ_by_one_wait_no_more_than_equal_ones():
    timeline = simulate(interleaved(4, 10, 2))
    assert most_idle(timeline) == 9
    assert peaks(timeline) == [12, 10, 8, 6]
