import math

import pytest

from par_pipeline import Action, Costs, Event, Timeline, one_f_one_b, simulate, zb_h1


def test_a_number_is_for_all_stages_and_a_list_for_each():
    costs = Costs(2, [1.0, 3.0], communication=[0.5, 0.0])
    assert costs.by_stage(2) == ([2.0, 2.0], [1.0, 3.0], [1.0, 1.0], [0.5, 0.0])


def test_a_list_for_another_number_of_stages_is_refused():
    with pytest.raises(ValueError, match="the cost weight_grad is given for 3 stages, but there are 2"):
        simulate(one_f_one_b(2, 4), Costs(weight_grad=[1, 2, 3]))


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, [1.0, -1.0]])
def test_a_cost_that_is_no_time_is_refused(wrong):
    with pytest.raises(ValueError, match=r"the cost forward is .*, it must be a number of at least 0"):
        Costs(forward=wrong)


def test_measured_costs_of_a_simulated_run_are_those_it_ran_with():
    costs = Costs([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], 0.25)
    timeline = simulate(zb_h1(3, 5), costs)
    measured = Costs.measured(timeline, communication=0.25)
    assert measured.by_stage(3) == costs.by_stage(3)
    assert simulate(zb_h1(3, 5), measured).makespan == timeline.makespan


def test_measured_costs_are_medians_and_whole_backwards_are_halved():
    events, clock = [], 0.0
    for k, (forward, backward) in enumerate([(1.0, 4.0), (2.0, 6.0), (90.0, 80.0)]):  # one slow microbatch
        for op, seconds in (("F", forward), ("B", backward)):
            events.append(Event(0, Action(op, 0, k), clock, clock + seconds))
            clock += seconds
    assert Costs.measured(Timeline(events)) == Costs([2.0], [3.0], [3.0], 0.0)


def test_a_run_without_backwards_cannot_be_measured():
    with pytest.raises(ValueError, match="stage 0 has no I in the timeline; record a whole step of all ranks"):
        Costs.measured(Timeline([Event(0, Action("F", 0, 0), 0.0, 1.0)]))
