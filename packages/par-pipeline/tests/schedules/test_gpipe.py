import pytest

from par_pipeline import gpipe, looped_bfs, simulate

from ..schedule_helpers import most_idle, peaks, text, torch_actions


def test_all_forwards_come_before_all_backwards():
    assert text(gpipe(2, 3).ranks[1]) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_the_numbers_of_four_ranks_and_eight_microbatches():
    timeline = simulate(gpipe(4, 8))
    assert timeline.makespan == 33
    assert most_idle(timeline) == 9
    assert peaks(timeline) == [8, 8, 8, 8]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 8), (5, 2)])
def test_the_looped_form_is_torch_s(ranks, microbatches, chunks):
    ours = looped_bfs(ranks, microbatches, chunks)
    for rank in range(ranks):
        expected = torch_actions("ScheduleLoopedBFS", rank, ranks, microbatches, chunks)
        assert text(ours.ranks[rank]) == expected


def test_the_looped_form_divides_the_idle_time_by_the_chunks():
    timeline = simulate(looped_bfs(4, 8, 2))
    assert timeline.makespan == 57
    assert most_idle(timeline) == 9  # of actions half as long
    assert peaks(timeline) == [16, 16, 16, 16]
