"""Sends and receives follow from the actions."""

import pytest

from par_pipeline import gpipe, one_f_one_b, zb_h1, zb_v
from par_pipeline._program import LOSS, STATUS, WELL, Message, compile_program

from .runtime_helpers import SCHEDULES


def test_the_program_of_the_last_of_two_ranks_is_as_written_by_hand():
    program = compile_program(one_f_one_b(2, 2), 1)
    assert [str(each.action) for each in program.instructions] == ["1F0", "1B0", "1F1", "1B1"]
    assert [each.takes for each in program.instructions] == [Message(False, 1, 0), None, Message(False, 1, 1), None]
    assert [each.gives for each in program.instructions] == [None, Message(True, 0, 0), None, Message(True, 0, 1)]
    assert [(each.message, each.position) for each in program.arrivals[0]] == [
        (Message(False, 1, 0), 0),
        (Message(False, 1, 1), 1),
        (STATUS, -1),
    ]
    assert program.consumed == {Message(True, 0, 0): 2, Message(True, 0, 1): 3}
    assert program.final == {1: (3, 3)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_message_is_sent_once_and_expected_in_the_order_in_which_it_is_sent(name, ranks, forward_only):
    schedule = SCHEDULES[name](ranks, 9)
    programs = [compile_program(schedule, rank, forward_only=forward_only) for rank in range(ranks)]
    messages = []
    for rank, program in enumerate(programs):
        for peer, arrivals in program.arrivals.items():
            sent = [
                (each.gives, i)
                for i, each in enumerate(programs[peer].instructions)
                if each.target == rank and each.gives
            ]
            assert [*sent, (STATUS, -1)] == [each[:2] for each in arrivals]
            assert programs[peer].departures[rank] == tuple(each.message for each in arrivals)
        for position, each in enumerate(program.instructions):
            messages += [each.gives] if each.gives else []
            if each.takes and each.source != rank:
                assert programs[each.source].consumed[each.takes] == position
    borders = (schedule.stages - 1) * schedule.microbatches
    assert len(messages) == len(set(messages)) == borders * (1 if forward_only else 2)
    assert set(messages) == {each.takes for program in programs for each in program.instructions if each.takes}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("forward_only", [False, True])
def test_what_is_taken_next_is_due_with_what_comes_before_it(name, ranks, forward_only):
    schedule, most = SCHEDULES[name](ranks, 9), set()
    for rank in range(ranks):
        program = compile_program(schedule, rank, forward_only=forward_only, broadcasts_loss=True)
        for peer, arrivals in program.arrivals.items():
            due = {each.message: each.after for each in arrivals[:-1]}
            assert list(due.values()) == sorted(due.values())  # in the order in which the peer sends
            taken = [each.takes for each in program.instructions if each.source == peer and each.takes]
            taken += [each.message for each in arrivals if each.message in (WELL, LOSS)]
            for count, message in enumerate(taken):
                posted = [each for each, after in due.items() if after <= count]
                assert message in posted
                most.add(len(set(posted) - set(taken[:count])))
    in_order = {"gpipe", "1f1b", "looped_bfs", "zb_h1", "zb_h2"}
    assert max(most) <= (1 if name in in_order else 2)


def test_the_last_action_of_a_stage_is_known_for_split_and_for_whole_backwards():
    program = compile_program(zb_h1(2, 4), 0)
    texts = [str(each.action) for each in program.instructions]
    assert [texts[position] for position in program.final[0]] == ["0W3", "0I3"]
    assert set(compile_program(zb_v(2, 4), 1).final) == {1, 2}
    assert compile_program(gpipe(2, 4), 0, forward_only=True).final == {}
