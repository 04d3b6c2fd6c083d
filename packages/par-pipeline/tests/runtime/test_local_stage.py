"""What a stage may do, take and pass on: its gradients are those of the serial step."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_pipeline import (
    Microbatches,
    PipelineError,
    one_f_one_b,
    zb_h1,
)
from par_pipeline.runtime.local_stage import LocalStage
from par_testing import default_device_type, for_each

from ..runtime_helpers import (
    SCHEDULES,
    TYPICAL,
    WHOLE,
    assert_gradients,
    backward_order,
    block,
    check_steps,
    clear,
    copied,
    data,
    mine,
    mse,
    pipeline,
    send_tensors_apart,
    serial,
    stages_of,
)


@for_each(name=TYPICAL, apart=[False, True])
@pytest.mark.ranks(2)
def test_row_count_width_and_dtype_may_change_from_step_to_step(name, apart):
    send_tensors_apart(apart)

    class AnyLength(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner = block(5, number)

        def forward(self, x):
            return self.inner(x.double()).to(x.dtype)

    schedule = SCHEDULES[name](2, 4)
    batches = []
    for number, (rows, length, dtype) in enumerate(
        [
            (8, 3, torch.float64),
            (8, 15, torch.float64),
            (17, 15, torch.float32),
            (8, 3, torch.float64),
            (9, 1, torch.float32),
        ]
    ):
        generator = torch.Generator().manual_seed(number)
        batches.append(tuple(torch.randn(rows, length, 5, generator=generator).to(dtype) for _ in range(2)))
    stages = stages_of(schedule, AnyLength)
    reference = copied(stages)
    run = pipeline(stages, schedule)
    for x, y in batches:
        run.step(x, target=y)
        serial(reference, x.tensor_split(4), y.tensor_split(4))
        assert_gradients(stages, reference, schedule, exact=name in WHOLE)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_sequence_length_may_change_from_microbatch_to_microbatch(name):
    schedule = SCHEDULES[name](2, 5)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule)
    for lengths in ([3, 17, 1, 123, 8], [8, 3, 17, 17, 2]):
        xs = [
            torch.randn(2, each, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(each))
            for each in lengths
        ]
        run.step(Microbatches(xs), target=Microbatches([2 * each for each in xs]))
        serial(reference, xs, [2 * each for each in xs])
        assert_gradients(stages, reference, schedule, exact=name in WHOLE)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_autocast_may_be_switched_on_after_a_step(name):
    schedule = SCHEDULES[name](2, 3)
    stages = [block(6, number, torch.float32) for number in range(schedule.stages)]
    reference = copied(stages)
    run = pipeline(stages, schedule)
    for step, on in enumerate((False, True, False)):
        x, y = data(9, 6, seed=step, dtype=torch.float32)
        clear([*stages, *reference])
        with torch.autocast(default_device_type(), torch.bfloat16, enabled=on):
            loss = run.step(x, target=y).loss
        expected = 0.0
        for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            with torch.autocast(default_device_type(), torch.bfloat16, enabled=on):
                its = mse(nn.Sequential(*reference)(a), b) / 3
            its.backward()
            expected = expected + its.detach()
        if run.is_last:
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # the weights are rounded elsewhere
        for number in schedule.stage_of(dist.get_rank()):
            for one, other in zip(stages[number].parameters(), reference[number].parameters(), strict=True):
                # a product of bfloat16 numbers, rounded once more or less
                torch.testing.assert_close(one.grad, other.grad, rtol=2e-2 if on else 1e-5, atol=1e-3 if on else 1e-6)


class Travelled(torch.autograd.Function):
    """A border between ranks in bfloat16, both ways."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_a_border_dtype_rounds_what_travels_between_ranks_and_nothing_else(name):
    schedule = SCHEDULES[name](2, 5)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule, transport={"dtype": torch.bfloat16})
    crossed = []
    for number, stage in enumerate(reference):
        crossed.append(stage)
        if number + 1 < schedule.stages and schedule.rank_of(number) != schedule.rank_of(number + 1):
            crossed.append(Travelled.apply)
    for step in range(2):
        x, y = data(17, seed=step)
        loss = run.step(x, target=y).loss
        expected = serial(crossed, x.tensor_split(5), y.tensor_split(5), order=backward_order(schedule))
        assert_gradients(stages, reference, schedule, exact=name in WHOLE)
        if run.is_last:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


class Nested(nn.Module):
    """Takes and gives a dict in a tuple, with None, plain values and integers; uses only a part of what it gets."""

    def __init__(self, number, last):
        super().__init__()
        self.number, self.last = number, last
        self.inner = block(5, number)

    def forward(self, x, extra=None, *, scale=None):
        ids = torch.arange(len(x)) if extra is None else extra["ids"]
        kept = x if extra is None else extra["kept"]
        y = self.inner(x) + kept.mean()
        if scale is not None:
            y = y * scale
        if self.last:
            return {"y": y, "ids": ids}
        return y, {
            "ids": ids + 1,
            "kept": kept,
            "half": y.detach().half(),
            "none": None,
            "name": f"stage {self.number}",
        }


@for_each(name=TYPICAL, apart=[False, True])
@pytest.mark.ranks(2)
def test_stages_may_pass_dicts_tuples_none_integers_and_a_skip_connection(name, apart):
    send_tensors_apart(apart)
    schedule = SCHEDULES[name](2, 3)
    last = schedule.stages - 1

    def loss_fn(output, target):
        assert output["ids"].tolist() == [i + last for i in range(len(target))]
        return mse(output["y"], target)

    check_steps(schedule, lambda number: Nested(number, number == last), [data(11), data(11, seed=1)], loss_fn)


class InPlace(nn.Module):
    """Writes into one of the tensors that it gets."""

    def __init__(self, number):
        super().__init__()
        self.inner, self.number = block(5, number), number

    def forward(self, x, count=None):
        count = torch.zeros(len(x), 1, dtype=x.dtype) if count is None else count
        y = self.inner(x)
        count += 1  # after autograd has saved the other one
        return (y + count, count) if self.number == 0 else y + count


@for_each(name=["1f1b", "zb_h1"])
@pytest.mark.ranks(2)
def test_a_stage_may_write_into_a_tensor_that_came_with_another_one(name):
    check_steps(SCHEDULES[name](2, 3), InPlace, [data(7), data(7, seed=1)])


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_the_first_layer_of_a_stage_may_work_in_place(name):
    def make(number):
        inner = block(5, number)
        return nn.Sequential(nn.Sequential(nn.ReLU(inplace=True)), inner) if number else inner

    check_steps(SCHEDULES[name](2, 3), make, [data(7), data(7, seed=1)])


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_keyword_arguments_are_split_and_go_to_every_stage_of_the_rank(name):
    schedule = SCHEDULES[name](2, 3)
    last = schedule.stages - 1
    stages = stages_of(schedule, lambda number: Nested(number, number == last))
    reference = copied(stages)
    run = pipeline(stages, schedule, loss_fn=lambda output, target: mse(output["y"], target))
    x, y = data(11)
    scale = torch.linspace(0.5, 2, 11, dtype=torch.float64)[:, None]
    run.step(x, target=y, scale=scale)
    for a, b, c in zip(x.tensor_split(3), y.tensor_split(3), scale.tensor_split(3), strict=True):
        value = (a,)
        for stage in reference:
            value = stage(*value, scale=c)
        (mse(value["y"], b) * (len(b) / 11)).backward()
    assert_gradients(stages, reference, schedule, exact=False)  # len / 11 is rounded elsewhere


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_frozen_parameters_get_no_gradient_and_others_all_of_theirs(name):
    schedule = SCHEDULES[name](2, 3)
    for frozen in ((0,), (1,), tuple(range(schedule.stages)), "weights"):

        def make(number, frozen=frozen):
            stage = block(5, number)
            for parameter in stage.parameters():
                parameter.requires_grad_(parameter.dim() != 2 if frozen == "weights" else number not in frozen)
            return stage

        check_steps(schedule, make, [data(7), data(7, seed=1)])


class Counting(nn.Module):
    """Runs its block under activation checkpointing and counts."""

    def __init__(self, number, reentrant):
        super().__init__()
        self.inner, self.reentrant, self.calls = block(5, number), reentrant, 0

    def run(self, x):
        self.calls += 1
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=self.reentrant)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_activation_checkpointing_recomputes_once(name):
    schedule = SCHEDULES[name](2, 3)
    stages, _ = check_steps(schedule, lambda number: Counting(number, False), [data(7)])
    assert [each.calls for each in mine(stages, schedule)] == [6] * len(mine(stages, schedule))


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_hooks_of_parameters_run_once_a_microbatch_and_see_its_gradient(name):
    schedule = SCHEDULES[name](2, 3)
    stages = stages_of(schedule)
    reference = copied(stages)
    seen, expected = [], []

    def listen(modules, to):
        for number in schedule.stage_of(dist.get_rank()):
            for key, parameter in modules[number].named_parameters():
                parameter.register_hook(lambda g, key=(number, key): to.append((key, "tensor", g.clone())) or 2 * g)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, key=(number, key): to.append((key, "after", p.grad.clone()))
                )

    listen(stages, seen)
    listen(reference, expected)
    run = pipeline(stages, schedule)
    x, y = data(7)
    run.step(x, target=y)
    serial(reference, x.tensor_split(3), y.tensor_split(3))
    for key in {each[:2] for each in expected}:
        one, other = ([each[2] for each in side if each[:2] == key] for side in (seen, expected))
        assert len(one) == len(other) == 3
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_convolutions_embeddings_and_weights_used_twice_are_split_too(name):
    class Twice(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.conv = nn.Conv1d(3, 3, 3, padding=1, groups=3).double()
            self.strided = nn.Conv1d(3, 3, 3, stride=2, padding=1, bias=False).double()
            self.up = nn.Linear(3, 6, bias=False).double()
            self.table = nn.Embedding(5, 6).double()

        def forward(self, x):
            x = self.conv(self.conv(x)).tanh() + self.strided(torch.cat([x, x], -1))
            wide = self.up(x) + self.up(x * x) + self.table(torch.arange(5) % 3)[:3].sum(0)
            return torch.nn.functional.linear(wide, self.up.weight.t())

    schedule = SCHEDULES[name](2, 3)
    x, y = data(7 * 9, width=1)
    check_steps(schedule, Twice, [(x.view(7, 3, 3), y.view(7, 3, 3))])


@pytest.mark.cpu(reason="a strict device has no fused GRU cell")
@pytest.mark.ranks(2)
def test_a_module_that_keeps_its_parameters_elsewhere_runs_its_backward_whole():
    class Recurrent(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.inner = nn.GRU(5, 5, batch_first=True).double()

        def forward(self, x):
            return self.inner(x)[0]

    x, y = data(7 * 3)
    with pytest.warns(UserWarning, match="its layer 'inner' is an nn.GRU"):
        check_steps(zb_h1(2, 3), Recurrent, [(x.view(7, 3, 5), y.view(7, 3, 5))], split_backward="where possible")


class TakesGradients(nn.Module):
    """Gives a gradient of what its layer gives, as forces are one of an energy."""

    def __init__(self, create_graph):
        super().__init__()
        self.inner, self.create_graph = nn.Linear(5, 5).double(), create_graph

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.inner(x).tanh()
        return y + torch.autograd.grad(y.square().sum(), x, create_graph=self.create_graph, retain_graph=True)[0]


@for_each(create_graph=[False, True])
@pytest.mark.ranks(2)
def test_a_stage_that_takes_gradients_itself_runs_whole_backwards_and_is_refused_for_split_ones(create_graph):
    def make(number):
        torch.manual_seed(number)
        return TakesGradients(create_graph)

    check_steps(one_f_one_b(2, 4), make, [data(9)])
    schedule = SCHEDULES["zb_h1"](2, 4)
    x, y = data(9)
    with pytest.raises(PipelineError, match=r"a stage takes gradients itself, .* use a schedule with whole backwards"):
        pipeline(stages_of(schedule, make), schedule).step(x, target=y)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_complex_layers_have_their_gradients_too(name):
    def loss_fn(output, target):
        return (output - target).abs().square().mean()

    def make(number):
        torch.manual_seed(number)
        convolution = nn.Conv1d(1, 1, 3, padding=1, dtype=torch.complex128)
        linear = nn.Linear(5, 5, dtype=torch.complex128)
        return nn.Sequential(nn.Unflatten(1, (1, 5)), convolution, nn.Flatten(), linear)

    schedule = SCHEDULES[name](2, 3)
    stages = stages_of(schedule, make)
    reference = copied(stages)
    batch = [each.to(torch.complex128) * (1 + 2j) for each in data(9)]
    pipeline(stages, schedule, loss_fn=loss_fn).step(batch[0], target=batch[1])
    serial(reference, *(each.tensor_split(3) for each in batch), loss_fn=loss_fn)
    assert_gradients(stages, reference, schedule, exact=False)


class Replaces(nn.Module):
    """Replaces a parameter in its forward, as codebooks that are averages do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5).double()
        self.codes = nn.Parameter(torch.zeros(5, dtype=torch.float64), requires_grad=True)

    def forward(self, x):
        self.codes = nn.Parameter(self.codes.detach() + 0.1)
        return self.inner(x)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_a_parameter_that_a_forward_replaces_stays_replaced(name):
    schedule = SCHEDULES[name](2, 4)
    stages = stages_of(schedule, lambda number: Replaces())
    x, y = data(9)
    pipeline(stages, schedule).step(x, target=y)
    for each in mine(stages, schedule):
        torch.testing.assert_close(each.codes.detach(), torch.full((5,), 0.4, dtype=torch.float64))


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_that_gives_its_input_gradients_early_keeps_nothing(fails):
    """Of each step a stage that reduces gradients by itself kept an input, its gradient and all that the step knew."""
    stage, given = LocalStage(nn.Linear(3, 3)), []
    x = torch.ones(2, 3, requires_grad=True)
    y = stage.module(x)
    if fails:
        y.register_hook(lambda _: 1 / 0)
    stage.keep(0, [x], [y])

    def ready(gradients):
        given.append([gradient.shape for gradient in gradients])

    kept = [ref(x), ref(ready)]
    if fails:
        with pytest.raises(ZeroDivisionError):
            stage.backward(0, (torch.ones(2, 3),), ready)
    else:
        stage.backward(0, (torch.ones(2, 3),), ready)
    assert given == ([] if fails else [[(2, 3)]])
    del x, y, ready
    gc.collect()
    assert [each() for each in kept] == [None, None]
