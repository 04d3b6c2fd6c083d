"""Schedules stand still where a step was skipped."""

import math

import pytest
import torch
from torch import nn

from par_precision import DynamicScale, mixed


def trained(script, *, on_inner=False):
    """Learning rates after each step; True in the script is an overflow."""
    module = nn.Linear(3, 1)
    inner = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, fused=True)
    early = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5) if on_inner else None
    module, optimizer = mixed(module, inner, "fp16", scale=DynamicScale(init=4.0, interval=2))
    schedule = optimizer.schedule(early or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rates = []
    for found in script:
        optimizer.backward(module(torch.ones(1, 3)).sum() * (math.inf if found else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, optimizer, schedule


@pytest.mark.parametrize("on_inner", [False, True])
def test_a_skipped_step_advances_nothing(on_inner):
    rates, optimizer, schedule = trained([True, False, True, True, False, False], on_inner=on_inner)
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.25, 0.125]
    assert schedule.get_last_lr() == [0.125]
    assert optimizer.scaling.skipped == 3
    assert optimizer.scaling.scale.value == 2.0  # 4, then 2, 2, 1, 1 for it falls no lower, 1, 2


def test_a_schedule_is_saved_and_loaded_like_the_scheduler_in_it():
    _, _, schedule = trained([False, False])
    _, _, other = trained([])
    other.load_state_dict(schedule.state_dict())
    assert other.scheduler.last_epoch == schedule.scheduler.last_epoch == 2


def test_a_schedule_may_step_before_the_optimizer_has():
    _, _, schedule = trained([])
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    assert schedule.scheduler.last_epoch == 1


@pytest.mark.parametrize("kind", ["ExponentialLR", "ReduceLROnPlateau"])
def test_whoever_asks_is_told_that_it_is_an_lr_scheduler(kind):
    _, optimizer, _ = trained([])
    inner = getattr(torch.optim.lr_scheduler, kind)(optimizer, **({"gamma": 0.5} if kind == "ExponentialLR" else {}))
    schedule = optimizer.schedule(inner)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert schedule.optimizer is optimizer
    assert schedule.last_epoch == inner.last_epoch == 0  # nothing has stepped by being wrapped
    assert schedule.get_last_lr() == [1.0]
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = schedule.nothing_such


def test_a_schedule_of_epochs_advances_where_the_last_step_was_skipped():
    module = nn.Linear(3, 1)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1.0), "fp16", scale=4.0)
    schedule = optimizer.schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    rates = []
    for epoch in ((False, True), (True, True), (True, False)):
        for found in epoch:
            optimizer.backward(module(torch.ones(1, 3)).sum() * (math.inf if found else 1.0))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25]
    schedule.step()  # no step came since
    assert optimizer.param_groups[0]["lr"] == 0.125
