"""The loss scale against torch's own scaler, and against models of Megatron's and DeepSpeed's."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.amp import GradScaler

from par_precision import DynamicScale

INF, OK = True, False
SCRIPTS = {
    "never": [OK] * 23,
    "always": [INF] * 12,
    "one in the middle of an interval": [OK] * 7 + [INF] + [OK] * 15,
    "two in a row": [OK] * 3 + [INF, INF] + [OK] * 14 + [INF] + [OK] * 6,
    "on the growth step": [OK] * 4 + [INF] + [OK] * 4 + [INF] + [OK] * 11,
    "at random": random.Random(0).choices([INF, OK], [1, 5], k=200),
}
scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


def trace(scale, script):
    values = []
    for found in script:
        scale.update(torch.tensor(found))
        values.append(scale.value.item())
    return values


def growths(values, first):
    return [i for i, (before, after) in enumerate(zip([first, *values], values, strict=False)) if after > before]


def torch_trace(script, interval, init):
    """torch's scaler, given gradients."""
    scaler = GradScaler("cpu", init_scale=init, growth_interval=interval)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    values = []
    for found in script:
        scaler.scale(torch.zeros(1))
        parameter.grad = torch.tensor([math.inf if found else 1.0])
        scaler.step(optimizer)
        scaler.update()
        values.append(scaler.get_scale())
    return values


def megatron_trace(script, interval, init, hysteresis):
    """A model of Megatron-LM's DynamicGradScaler with min_scale 1."""
    scale, good, patience, values = init, 0, hysteresis, []
    for found in script:
        if found:
            good = 0
            patience -= 1
            if patience <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            good += 1
            if good == interval:
                good, patience, scale = 0, hysteresis, scale * 2.0
        values.append(scale)
    return values


def deepspeed_trace(script, window, init):
    """A model of DeepSpeed's FP16_Optimizer."""
    scale, last, values = init, -1, []
    for iteration, found in enumerate(script):
        if found:
            scale, last = max(scale / 2, 1.0), iteration
        elif (stable := iteration - last - 1) > 0 and stable % window == 0:
            scale *= 2
        values.append(scale)
    return values


def deepspeed_zero_trace(script, window, init, shift):
    """A model of DeepSpeed's DynamicLossScaler, which its ZeRO stages use."""
    scale, last, patience, values = init, -1, shift, []
    for iteration, found in enumerate(script):
        if found:
            if patience == 1:
                scale = max(scale / 2, 1.0)
            else:
                patience -= 1
            last = iteration
        elif (iteration - last) % window == 0:
            patience, scale = shift, scale * 2
        values.append(scale)
    return values


@scripts
@pytest.mark.parametrize("init", [2.0**16, 3.0])
def test_the_torch_preset_gives_torchs_trace(script, init):
    assert trace(DynamicScale.torch(interval=5, init=init), script) == torch_trace(script, 5, init)


@scripts
def test_the_megatron_preset_gives_its_trace(script):
    scale = DynamicScale.megatron(interval=5)
    assert trace(scale, script) == megatron_trace(script, 5, 2.0**32, 2)


@scripts
def test_the_deepspeed_preset_gives_the_traces_of_both_of_its_scalers(script):
    fp16_optimizer = DynamicScale.deepspeed(interval=5, hysteresis=1)
    assert trace(fp16_optimizer, script) == deepspeed_trace(script, 5, 2.0**16)
    zero = DynamicScale.deepspeed(interval=5, late=0)
    assert trace(zero, script) == deepspeed_zero_trace(script, 5, 2.0**16, 2)


def test_presets_have_the_settings_of_those_libraries():
    assert DynamicScale.torch().state_dict()["settings"] == {
        **DynamicScale(min=2.0**-126, max=2.0**127).state_dict()["settings"]
    }
    megatron, deepspeed = DynamicScale.megatron(), DynamicScale.deepspeed()
    assert (megatron.init, megatron.interval, megatron.hysteresis) == (2.0**32, 1000, 2)
    assert (deepspeed.init, deepspeed.interval, deepspeed.hysteresis) == (2.0**16, 1000, 2)
    assert megatron.max > 2.0**32


@pytest.mark.parametrize("preset", [DynamicScale.torch, DynamicScale.megatron, DynamicScale.deepspeed])
def test_preset_with_settings_uses_them(preset):
    others = {"init": 8, "growth": 4, "backoff": 0.25, "interval": 7, "hysteresis": 3, "min": 2, "max": 16, "late": 5}
    assert preset(**others, max_skipped=9).state_dict()["settings"] == others | {"max_skipped": 9}
    with pytest.raises(TypeError, match="hystersis"):
        preset(hystersis=1)


def test_deepspeed_grows_one_step_later_than_torch():
    first = 2.0**16
    assert growths(trace(DynamicScale.torch(interval=5), [OK] * 16), first) == [4, 9, 14]
    assert growths(trace(DynamicScale.deepspeed(interval=5), [OK] * 16), first) == [5, 10, 15]


def test_the_scale_is_clamped_at_both_ends():
    scale = DynamicScale(init=8, min=2, max=16, interval=1)
    assert trace(scale, [OK, OK, INF, INF, INF, INF, OK]) == [16, 16, 8, 4, 2, 2, 4]


def test_a_static_scale_stays():
    assert set(trace(DynamicScale.static(1000.0), [OK, INF] * 5)) == {1000.0}


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(0, 40),
    st.fixed_dictionaries({"interval": st.integers(1, 4), "hysteresis": st.integers(1, 3), "late": st.integers(0, 1)}),
)
def test_a_scale_that_is_resumed_anywhere_goes_on_as_it_would_have(script, cut, settings):
    whole, first, second = (DynamicScale(**settings) for _ in range(3))
    expected = trace(whole, script)
    before = trace(first, script[:cut])
    second.load_state_dict(first.state_dict())
    assert before + trace(second, script[cut:]) == expected


def test_a_loaded_scale_keeps_to_its_own_bounds():
    scale = DynamicScale(init=4, max=8)
    scale.load_state_dict(DynamicScale(init=2.0**20).state_dict())
    assert scale.value == 8


def test_a_static_scale_stays_what_it_is_when_a_state_is_loaded():
    scale = DynamicScale.static(128.0)
    scale.load_state_dict(DynamicScale().state_dict())
    assert scale.value == 128


def test_a_scale_grows_also_where_the_saved_run_had_a_longer_interval():
    before, scale = DynamicScale(init=4, interval=100), DynamicScale(init=4, interval=10)
    trace(before, [OK] * 50)
    scale.load_state_dict(before.state_dict())
    assert growths(trace(scale, [OK] * 22), 4.0) == [0, 10, 20]


def test_found_inf_may_be_a_number_as_torch_has_it():
    scale = DynamicScale(init=4)
    scale.update(torch.tensor(1.0))
    assert scale.value == 2


def test_an_earlier_loss_keeps_the_scale_that_it_was_multiplied_with():
    scale, weight = DynamicScale(init=4), torch.ones(1, requires_grad=True)
    loss = (weight * scale.value).sum()
    scale.update(torch.tensor(INF))
    loss.backward()
    assert weight.grad == 4


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"growth": 0.5}, "growth of the scale is 0.5"),
        ({"backoff": 0.0}, "backoff"),
        ({"backoff": 2.0}, "backoff"),
        ({"interval": 0}, "interval"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"late": -1}, "late"),
        ({"init": 2.0**30}, r"init .* to max=16777216.0"),
        ({"init": 0.5}, r"init .* from min=1.0"),
        ({"min": 0.0}, "min"),
        ({"max": math.inf}, "2\\*\\*127"),
        ({"init": math.nan}, "init of the scale is nan"),
        ({"max_skipped": 0}, "max_skipped of the scale is 0; give 1 or more"),
    ],
)
def test_settings_that_make_no_sense_are_named(setting, words):
    with pytest.raises(ValueError, match=words):
        DynamicScale(**setting)
