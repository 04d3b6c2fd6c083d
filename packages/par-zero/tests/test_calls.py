"""Which units a backward pass has left behind, by when they were called. Pure arithmetic."""

import torch

from par_zero.calls.record import Call, Calls


def call(calls, *units, within=(), has_graph=True):
    """A call of units, in which others are called."""
    calls.begin()
    inner = [call(calls, each, has_graph=has_graph) for each in within]
    return (*inner, calls.end(units, has_graph=has_graph)) if within else calls.end(units, has_graph=has_graph)


def test_what_was_called_later_is_left_behind_once():
    calls = Calls(4)
    made = [call(calls, number) for number in (1, 2, 3)]
    assert [calls.left_behind(each) for each in reversed(made)] == [[], [3], [2]]
    calls.end_pass()
    assert calls.left_behind(made[0]) == [3, 2]


def test_a_unit_that_was_called_before_too_is_not_left_behind():
    calls = Calls(3)
    made = [call(calls, number) for number in (1, 2, 1)]
    assert [calls.left_behind(each) for each in reversed(made)] == [[], [], [2]]


def test_a_call_counts_as_long_as_there_is_a_graph_of_it():
    calls = Calls(3)
    made = [call(calls, number) for number in (2, 1, 2)]
    assert calls.left_behind(made[1]) == []
    calls.end_pass()
    del made[0]
    assert calls.left_behind(made[0]) == [2]


def test_neither_is_a_unit_left_behind_by_one_within_it_nor_that_by_the_outer_one():
    calls = Calls(4)
    inner, outer = call(calls, 2, within=(1,))
    last = call(calls, 3)
    assert [calls.left_behind(each) for each in (last, outer, inner)] == [[], [3], []]


def test_what_has_no_graph_yet_takes_the_place_of_its_call_in_forward():
    """As in a reentrant checkpoint, within a module that runs with gradients."""
    calls = Calls(4)
    calls.begin()
    with torch.no_grad():
        for number in (1, 2):
            call(calls, number, has_graph=False)
    last = call(calls, 3)
    calls.end([0], has_graph=True)
    assert calls.left_behind(last) == []
    for number, left in ((2, [3]), (1, [2])):
        calls.begin()
        assert calls.left_behind(calls.repeat([number])) == left
    calls.end_pass()
    assert not calls.uncalled
    assert calls.left_behind(last) == []
    assert calls.uncalled == [0, 1, 2]


def test_an_evaluation_leaves_nothing():
    calls = Calls(2)
    with torch.no_grad():
        call(calls, 1, has_graph=False)
    calls.left_behind(Call(0, 0))
    assert calls.uncalled == [0, 1]


def test_what_was_not_called_waits_for_the_first_call_of_another():
    """The second of two forwards comes first in backward, and what others have called in both comes again."""
    calls = Calls(4)
    made = [call(calls, 0, within=(1, 2)) for _ in range(2)]
    seen = []
    for inner_and_outer in reversed(made):
        for each in reversed(inner_and_outer):
            calls.left_behind(each)
            seen.append(calls.returned)
    assert calls.uncalled == [3]
    assert seen == [False, False, False, False, True, True]
    calls.end_pass()
    assert not calls.returned


def test_a_call_that_backward_went_through_counts_only_where_there_is_no_other():
    """Its graph is there as long as somebody keeps the loss; it may be retained, too."""
    calls = Calls(4)
    before = [call(calls, number) for number in (1, 2, 3)]
    assert [calls.left_behind(each) for each in reversed(before)] == [[], [3], [2]]
    calls.end_pass()
    again = [call(calls, number) for number in (1, 2)]
    assert [calls.left_behind(each) for each in reversed(again)] == [[], [2]]
    assert calls.returned
    assert calls.uncalled == [0]
    calls.end_pass()
    del again
    assert [calls.left_behind(each) for each in reversed(before)] == [[], [3], [2]]
