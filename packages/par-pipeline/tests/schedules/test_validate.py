import time

import pytest

from par_pipeline import Action, Schedule, one_f_one_b, zb_h1

from ..schedule_helpers import parsed, torch_one_f_one_b


def complaint(schedule):
    with pytest.raises(ValueError, match=r".") as error:
        schedule.validate()
    return str(error.value)


def test_a_whole_and_a_divided_backward_are_both_a_backward():
    parsed("0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0").validate()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0F0 0B0", "1F0 1B0", "rank 0, position 1: 0F0 is a second forward"),
        ("0F0 0B0 0F0", "1F0 1B0", "rank 0, position 2: 0F0 is a second forward"),
        ("0F0 0B0", "1F0 1B0 1B0", "rank 1, position 2: 1B0 is a second backward"),
        ("0F0 0B0", "1F0 1I0 1W0 1W0", "rank 1, position 3: 1W0 is a second backward"),
        ("0F0 0B0", "1F0 1I0 1B0", "rank 1, position 2: 1B0 is a second backward"),
        ("0F0 0B0", "1F0 1B0 1W0", "rank 1, position 2: 1W0 is a second backward"),
        ("0F0 0B0", "1F0 1W0 1I0", "rank 1, position 1: 1W0 comes before its input gradient"),
        ("0F0 0B0", "1B0 1F0", "rank 1, position 0: 1B0 comes before its forward"),
        ("0W0 0F0 0I0", "1F0 1B0", "rank 0, position 0: 0W0 comes before its forward"),
        ("0F0", "1F0 1B0", "rank 0 never runs B (or I and W) of stage 0, microbatch 0; add it"),
        ("0F0 0I0", "1F0 1B0", "rank 0 never runs W of stage 0, microbatch 0; add it"),
        ("0F0 0B0 0F1 0B1", "1F0 1B0", "rank 1 never runs F of stage 1, microbatch 1; add it"),
        ("0F0 0B0 1F0", "1F0 1B0", "rank 1, position 0: 1F0 is not for this rank, which has the stages []"),
        ("0F0 0B0", "2F0 2B0", "no rank holds stage 1; there are the stages [0, 2]"),
    ],
)
def test_what_is_no_training_step_is_refused_with_rank_position_and_action(first, second, message):
    assert complaint(parsed(first, second)) == message


def with_sizes(*lines, microbatches):
    ranks = parsed(*lines).ranks
    return Schedule(ranks, placement=[(rank,) for rank in range(len(ranks))], microbatches=microbatches)


def test_an_action_on_another_rank_than_the_placement_says_is_refused():
    expected = "rank 0, position 2: 1F0 is not for this rank, which has the stages [0]"
    assert complaint(with_sizes("0F0 0B0 1F0", "1F0 1B0", microbatches=1)) == expected


def test_a_microbatch_beyond_the_last_is_refused():
    expected = "rank 0, position 2: 0F1 is beyond the 1 microbatches, counted from 0"
    assert complaint(with_sizes("0F0 0B0 0F1", microbatches=1)) == expected


def test_a_stage_on_two_ranks_is_refused():
    ranks = parsed("0F0 0B0", "1F0 1B0").ranks
    expected = "stage 1 is on rank 0 and on rank 1; give it to one"
    assert complaint(Schedule(ranks, placement=[(0, 1), (1,)])) == expected


def test_what_is_no_action_is_refused():
    one = [(0,)]
    expected = "rank 0, position 0: '0F0' is no Action; write Action('F', 2, 0), or Action.parse('2F0')"
    assert complaint(Schedule([["0F0", "0B0"]], placement=one, microbatches=1)) == expected
    expected = "rank 0, position 1: 0X0 has an unknown operation; use F, B, I or W"
    assert complaint(Schedule([[Action("F", 0, 0), Action("X", 0, 0)]])) == expected


def test_stages_that_are_no_count_and_ranks_without_any_are_refused():
    below = [Action("F", -1, 0), Action("B", -1, 0)]
    assert complaint(Schedule([[Action("F", 0, 0), Action("B", 0, 0), *below]])) == (
        "rank 0 has stage -1; stages are counted from 0"
    )
    expected = "rank 1 has no stage; give it one, or make a schedule for fewer ranks"
    assert complaint(parsed("0F0 0B0", "", "1F0 1B0")) == expected


def test_ranks_that_wait_for_one_another_are_named_with_position_and_action():
    schedule = parsed("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert complaint(schedule) == (
        "the ranks wait for one another for ever: "
        "rank 0 waits at position 1, 0B0, for the backward of stage 1, microbatch 0, on rank 1; "
        "rank 1 waits at position 1, 1F1, for the forward of stage 0, microbatch 1, on rank 0"
    )


def test_a_rank_that_waits_for_itself_is_named():
    assert complaint(parsed("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0")) == (
        "the ranks wait for one another for ever: "
        "rank 0 waits at position 1, 3F0, for the forward of stage 2, microbatch 0, on rank 1; "
        "rank 1 waits at position 0, 2F0, for the forward of stage 1, microbatch 0, on rank 1"
    )


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(5, 7, 2), (4, 5, 3)])
def test_interleaving_by_plain_groups_is_found_to_deadlock(ranks, microbatches, chunks):
    def actions(rank, op):
        stages = range(rank, ranks * chunks, ranks)[:: 1 if op == "F" else -1]
        starts = range(0, microbatches, ranks)
        groups = [range(start, min(start + ranks, microbatches)) for start in starts]
        return [Action(op, stage, k) for group in groups for stage in stages for k in group]

    def plain(rank):
        ahead = min(microbatches * chunks, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
        forwards, backwards = actions(rank, "F"), actions(rank, "B")
        turns = [pair for k, backward in enumerate(backwards) for pair in (*forwards[ahead + k :][:1], backward)]
        return forwards[:ahead] + turns

    assert "wait for one another for ever" in complaint(Schedule([plain(rank) for rank in range(ranks)]))


def test_torch_s_one_f_one_b_is_found_to_be_malformed_on_its_last_rank():
    lines = torch_one_f_one_b(4, 8)
    expected = "rank 3, position 1: 3B0 comes before its forward"
    assert complaint(with_sizes(*lines, microbatches=8)) == expected
    assert complaint(parsed(*lines)) == expected


def test_a_message_that_overtakes_another_is_fine():
    parsed("0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0").validate()


def test_a_wrong_action_is_blamed_rather_than_what_it_leaves_missing_on_a_lower_rank():
    schedule = parsed("0F0 0B0", "1F0 1B0 1B3")  # makes the schedule look like one of four microbatches
    assert complaint(schedule) == "rank 1, position 2: 1B3 comes before its forward"


@pytest.mark.parametrize("made", [one_f_one_b, zb_h1])
def test_64_ranks_with_512_microbatches_are_checked_at_once(made):
    schedule = made(64, 512)
    start = time.process_time()
    schedule.validate()
    assert time.process_time() - start < 60  # seconds of this process; 0.14 and 0.18 measured, hours by the square
