import pytest

from par_pipeline import Action, Schedule, interleaved, zb_v

from ..schedule_helpers import parsed


def test_stages_and_microbatches_are_read_off_the_actions():
    schedule = parsed("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "2F0 1F0 1B0 2B0 2F1 1F1 1B1 2B1")
    assert (schedule.stages, schedule.microbatches) == (4, 2)
    assert [schedule.stage_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert [schedule.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert repr(schedule) == "Schedule(2 ranks, 4 stages, 2 microbatches)"


def test_stages_of_built_in_schedules_go_around_or_down_and_up():
    assert [interleaved(3, 3, chunks=3).stage_of(rank) for rank in range(3)] == [(0, 3, 6), (1, 4, 7), (2, 5, 8)]
    assert [zb_v(3, 3).stage_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [zb_v(3, 3).rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_actions_can_be_iterated_over_again_even_if_given_as_generators():
    schedule = Schedule([(Action(op, 0, k) for k in range(3) for op in "FB")])
    assert list(schedule.ranks[0]) == list(schedule.ranks[0]) != []
    assert list(interleaved(2, 5).ranks[1]) == list(interleaved(2, 5).ranks[1]) != []


def test_a_schedule_without_ranks_or_actions_is_refused():
    with pytest.raises(ValueError, match="needs the actions of at least one rank"):
        Schedule([])
    with pytest.raises(ValueError, match="has no actions; give each rank a list of Action"):
        Schedule([[], []])
    for stages, microbatches in (((), 1), ((0,), 0)):
        with pytest.raises(ValueError, match="has no actions"):
            Schedule([[]], placement=[stages], microbatches=microbatches)
    with pytest.raises(ValueError, match=r"rank 0, position 1: '0B0' is no Action; write Action\('F', 2, 0\)"):
        Schedule([[Action("F", 0, 0), "0B0"]])


def test_a_placement_for_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="placement is for 2 ranks, the actions are for 1"):
        Schedule([[Action("F", 0, 0)]], placement=[(0,), (1,)])


def test_a_stage_that_no_rank_holds_is_named():
    with pytest.raises(ValueError, match=r"no rank holds stage 2; there are the stages \[0, 1\]"):
        parsed("0F0 0B0", "1F0 1B0").rank_of(2)
