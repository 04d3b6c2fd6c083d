"""Spending what a first step has measured: against all choices there are, and in words."""

import itertools

import pytest

from par_plan.budget.first_step import MeasuredStep, plan_measured
from par_plan.budget.plan import Budget, BudgetPlan
from par_plan.budget.tiers import TierFractions, TooSmallError
from par_recompute import Choice, Choices, knapsack
from par_zero import DiskUsage

FRONTIERS = (
    (Choice(frozenset(), 15, 0.0), Choice(frozenset({"a"}), 9, 1.0), Choice(frozenset({""}), 2, 8.0)),
    (Choice(frozenset(), 12, 0.0), Choice(frozenset({"a"}), 7, 3.0), Choice(frozenset({""}), 3, 5.0)),
    (Choice(frozenset(), 15, 0.0), Choice(frozenset({"a"}), 9, 1.0), Choice(frozenset({""}), 2, 8.0)),
)
LEAST, MOST, LAYER = 7, 42, 15
PIECES = (4, 4, 3, 4)
KINDS = {"parameters": 20.0, "gradients": 20.0, "optimizer": 0.0}


def rest(room, *, rate=2.0, calls=1, held=1.0, pieces=PIECES, step=0.0):
    spent = BudgetPlan(
        budget=Budget(device=40.0 + room),
        shares=TierFractions(),
        kinds=KINDS,
        reasons=("device", "activations"),
        step=step,
        is_open=True,
    )
    model = Choices(layers=("0", "1", "2"), frontiers=FRONTIERS, forwards=calls)
    return plan_measured(
        spent, MeasuredStep(models=(model,), held=held, disk=DiskUsage(pieces=pieces, read=rate, write=rate))
    )


def lost(found, rate, calls, held):
    """Seconds of a step that run layers again, and read and write."""
    again = sum(choice.seconds for choice in knapsack(FRONTIERS, found.budgets[0])) * calls
    return again + (sum(PIECES) - found.recall) * 2 / rate


@pytest.mark.parametrize("rate", [0.5, 2.0, 8.0, 1e9])
@pytest.mark.parametrize(("calls", "held"), [(1, 1.0), (4, 1.0), (4, 2.0)])
def test_no_choice_of_layers_and_state_together_is_better_by_more_than_one_item(rate, calls, held):
    for room in range(int(LEAST * held + LAYER), int(MOST * held) + sum(PIECES) + LAYER + 3):
        found = rest(room, rate=rate, calls=calls, held=held)
        fits = room if room >= MOST * held + sum(PIECES) else room - LAYER
        used = held * sum(choice.bytes for choice in knapsack(FRONTIERS, found.budgets[0])) + found.recall
        assert used <= fits, room
        best = min(
            sum(choice.seconds for choice in layers) * calls + (sum(PIECES) - sum(back)) * 2 / rate
            for layers in itertools.product(*FRONTIERS)
            for count in range(len(PIECES) + 1)
            for back in itertools.combinations(PIECES, count)
            if held * sum(choice.bytes for choice in layers) + sum(back) <= fits
        )
        item = max(7.0 * calls, 4 * 2 / rate)
        assert best - 1e-9 <= lost(found, rate, calls, held) <= best + item, room
        assert found.spent.recalled == found.recall
        assert not found.spent.is_open


def test_state_that_comes_back_leaves_room_for_what_is_cast_while_the_optimizer_steps():
    room = MOST + sum(PIECES)
    assert rest(room, step=MOST - 1.0).recall == sum(PIECES)
    assert rest(room, step=MOST + 4.0).recall == sum(PIECES) - 4
    found = rest(room, step=float(room))
    assert (found.recall, found.budgets[0] >= MOST) == (0, True), "which activations may have"


def test_where_everything_fits_everything_is_kept_and_comes_back():
    found = rest(MOST + sum(PIECES))
    assert found.budgets[0] >= MOST
    assert found.recall == sum(PIECES)
    assert "all of it returns to memory" in found.spent.reasons[-2]
    assert found.spent.reasons[-1] == "activations: layers save all of their 42 B."


def test_what_takes_more_time_has_the_room_and_the_reasons_say_so():
    slow, quick = rest(LEAST + LAYER + 14, rate=1e-3), rest(LEAST + LAYER + 14, rate=1e9)
    assert slow.recall == 12
    assert "12 B return to memory: this saves more time per byte than saved activations" in slow.spent.reasons[-2]
    assert quick.recall == 0
    assert "all of it stays on the disk: saved activations save more time per byte" in quick.spent.reasons[-2]
    assert quick.spent.reasons[-1].startswith("activations: layers save up to 21 B of 42 B, and recompute the rest")


def test_the_least_is_said_with_what_it_is():
    rest(LEAST + LAYER)
    words = (
        "device is 61 B, and 62 B are the least: parameters 20, gradients 20, inputs of layers 7, one layer 15; raise"
    )
    with pytest.raises(TooSmallError, match=words) as caught:
        rest(LEAST + LAYER - 1)
    assert caught.value.tier == "device"
    assert caught.value.missing == 1
