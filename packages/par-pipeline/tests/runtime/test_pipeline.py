"""A step is the serial one, whatever stages pass on and batches look like."""

import dataclasses
import inspect
from random import Random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from par_pipeline import (
    Action,
    Microbatches,
    Pipeline,
    PipelineError,
    PipelineOptions,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from par_testing import for_each

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
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            loss = run.step(x, target=y).loss
        expected = 0.0
        for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
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
    run = pipeline(stages, schedule, border_dtype=torch.bfloat16)
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
    check_steps(zb_h1(2, 3), Recurrent, [(x.view(7, 3, 5), y.view(7, 3, 5))])


@pytest.mark.ranks(2)
def test_a_schedule_written_by_hand_may_mix_whole_and_split_backwards():
    text = ["0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0"]
    schedule = Schedule([[Action.parse(each) for each in line.split()] for line in text])
    check_steps(schedule, lambda number: block(5, number), [data(6), data(6, seed=1)])


@pytest.mark.ranks(1)
def test_one_rank_runs_all_stages_of_a_v():
    check_steps(zb_v(1, 3), lambda number: block(5, number), [data(7)])
    check_steps(interleaved(1, 3, 4), lambda number: block(5, number), [data(7)])


@pytest.mark.ranks(4)
def test_two_pipelines_side_by_side_in_one_world_do_not_meet():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    schedule = one_f_one_b(2, 3)
    stages = [block(5, 10 * (dist.get_rank() % 2) + number) for number in range(2)]
    reference = copied(stages)
    rank = dist.get_rank(group)
    run = Pipeline(stages[rank], schedule, group, loss_fn=mse)
    for step in range(2):
        x, y = data(7, seed=dist.get_rank() % 2 + 10 * step)
        run.step(x, target=y)
        serial(reference, x.tensor_split(3), y.tensor_split(3))
    for one, other in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@for_each(name=TYPICAL, budget=[(1, False), (10_000, True), (1 << 28, False)])
@pytest.mark.ranks(2)
def test_receives_are_posted_for_a_step_like_the_last_one_and_serve_any_other(name, budget):
    """Training and evaluation in any order, of any number of rows: results, and both ranks know of every buffer."""
    ahead, apart = budget
    send_tensors_apart(apart)
    schedule, random = SCHEDULES[name](2, 3), Random(0)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule, ahead=ahead)
    for number in range(12):
        clear([*stages, *reference])
        x, y = data(random.choice([3, 4, 40]), seed=number)
        expected = serial(reference, x.tensor_split(3), y.tensor_split(3), order=backward_order(schedule))
        if random.random() < 0.5:
            loss = run.step(x, target=y).loss
            assert_gradients(stages, reference, schedule, exact=name in WHOLE)
        else:
            loss = run.evaluate(x, target=y).loss
        if run.is_last:
            torch.testing.assert_close(loss, expected.to(loss))
        wire = run._equipment.wire
        (inbox,), (outbox,) = wire._inboxes.values(), wire._outboxes.values()
        known: list = [None, None]
        dist.all_gather_object(known, list(outbox._rooms))
        posted = [len(buffer) for buffer, *_ in inbox._posted]
        coming = [*posted, *inbox._planned][len(inbox._coming) :]  # but the word that the last step is done
        assert coming == known[1 - dist.get_rank()]
        assert coming  # at least that word
        assert len(posted) == 1 or ahead > 1
        assert not inbox._planned or ahead < 1 << 28
    send_tensors_apart(apart=False)


@pytest.mark.ranks(2)
def test_a_weight_of_targets_without_targets_is_refused_on_all_ranks():
    schedule = one_f_one_b(2, 2)
    run = pipeline(stages_of(schedule), schedule, loss_fn=lambda output: output.sum(), weight=len)
    x, _ = data(4)
    with pytest.raises(ValueError, match="weight counts what a target holds, but this step has none; give it target="):
        run.step(x)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_a_weight_per_target_gives_the_mean_over_all_that_counts(name):
    def loss_fn(output, target):
        return nn.functional.cross_entropy(output, target, ignore_index=-100)

    schedule = SCHEDULES[name](2, 4)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule, loss_fn=loss_fn, weight=lambda target: (target >= 0).sum())
    x, _ = data(9)
    target = torch.tensor([0, -100, -100, 3, 4, -100, -100, 1, 2])  # the third of 3 2 2 2 has none that counts
    loss = run.step(x, target=target).loss
    whole = x
    for stage in reference:
        whole = stage(whole)
    expected = loss_fn(whole, target)
    expected.backward()
    assert_gradients(stages, reference, schedule, exact=False)
    if run.is_last:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_losses_that_are_parts_of_a_sum_are_added_up_as_they_are(name):
    x, y = data(11)
    schedule = SCHEDULES[name](2, 3)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule, loss_fn=lambda output, target: (output - target).square().sum(), reduction="sum")
    loss = run.step(x, target=y).loss
    expected = (nn.Sequential(*reference)(x) - y).square().sum()
    expected.backward()
    assert_gradients(stages, reference, schedule, exact=False)  # whose sums are in another order
    if run.is_last:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)


def test_an_editor_shows_every_keyword_with_the_default_that_is_used():
    listed = inspect.signature(Pipeline).parameters.values()
    keywords = {each.name: each.default for each in listed if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {each.name: each.default for each in dataclasses.fields(PipelineOptions)}


@pytest.mark.ranks(4)
def test_weights_are_averaged_over_the_data_ranks_so_that_averaged_gradients_are_one_device_s():
    def loss_fn(output, target):
        return nn.functional.cross_entropy(output, target, ignore_index=-100)

    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which, rank = divmod(dist.get_rank(), 2)
    schedule = one_f_one_b(2, 3)
    stages = [block(5, number) for number in range(2)]
    reference = copied(stages)
    run = Pipeline(
        stages[rank],
        schedule,
        pipelines[which],
        loss_fn=loss_fn,
        weight=lambda target: (target >= 0).sum(),
        weight_group=replicas[rank],
    )
    x, _ = data(12)
    target = torch.tensor([0, 1, 2, -100, 4, 0, 1, -100, -100, -100, 3, 4])
    run.step(x.chunk(2)[which], target=target.chunk(2)[which])
    loss_fn(reference[1](reference[0](x)), target).backward()
    for one, other in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
        dist.all_reduce(one.grad, group=replicas[rank])
        torch.testing.assert_close(one.grad / 2, other.grad, rtol=1e-10, atol=1e-10)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_evaluation_gives_loss_and_outputs_and_leaves_no_gradients(name):
    schedule = SCHEDULES[name](2, 3)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(11)
    with torch.no_grad():
        whole = torch.cat([nn.Sequential(*stages)(each) for each in x.tensor_split(3)])
    for _ in range(2):
        result = run.evaluate(x, target=y)
        run.step(x, target=y)
        clear(stages)
        again = run.evaluate(x)
        if run.is_last:
            assert torch.equal(result.outputs, whole)
            assert torch.equal(again.outputs, whole)
            assert again.loss is None
            torch.testing.assert_close(result.loss, mse(whole, y), rtol=1e-12, atol=0)
            assert not result.outputs.requires_grad
        else:
            assert result == (None, None)
        assert all(each.grad is None for stage in stages for each in stage.parameters())


@pytest.mark.ranks(2)
def test_outputs_and_loss_are_given_where_they_are_asked_for():
    schedule = gpipe(2, 3)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule, broadcast_loss=True)
    x, y = data(11)
    loss, outputs = run.step(x, target=y, return_outputs=True)
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(losses, loss)
    assert losses[0] == losses[1] > 0
    assert (outputs is not None) == run.is_last
    if run.is_last:
        torch.testing.assert_close(mse(outputs, y), loss, rtol=1e-12, atol=0)


@pytest.mark.ranks(2)
def test_a_loop_of_the_reference_s_shape_runs():
    schedule = zb_v(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    batches = iter([(x, y), [x, y], (x, y)])
    output, label, loss = run.forward_backward_step(batches)
    assert output is None
    assert (label is y, loss is not None) == (run.is_last, run.is_last)
    output, label, loss = run.forward_backward_step(batches, return_loss=False, return_outputs=True)
    assert loss is None
    assert (output is not None) == run.is_last
    clear(stages)
    output, label, loss = run.forward_backward_step(batches, forward_only=True, return_outputs=True)
    assert (output is not None) == (loss is not None) == run.is_last
    assert all(each.grad is None for stage in stages for each in stage.parameters())
    with pytest.raises(StopIteration):
        run.forward_backward_step(batches)


@pytest.mark.ranks(2)
def test_the_timeline_of_a_step_has_every_action_on_one_clock():
    schedule = zb_h1(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    for _ in range(2):
        x, y = data(8)
        run.step(x, target=y)
    timeline = run.timeline()
    events = list(timeline.events)
    assert sorted(each.action for each in events) == sorted(action for actions in schedule.ranks for action in actions)
    ends = {each.action: each.end for each in events}
    starts = {each.action: each.start for each in events}
    assert min(starts.values()) == 0
    for microbatch in range(4):  # barriers set the clocks, to within the time that they take on a busy machine
        assert starts[Action("F", 1, microbatch)] > starts[Action("F", 0, microbatch)] - 0.5
        assert starts[Action("I", 0, microbatch)] > ends[Action("F", 1, microbatch)] - 0.5
    assert timeline.makespan == pytest.approx(max(ends.values()))


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


class Hiding(nn.Module):
    """Gives an object with a tensor in it."""

    def forward(self, x):
        return SimpleNamespace(logits=x)


@pytest.mark.ranks(2)
def test_outputs_that_hide_their_tensors_cannot_be_returned():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    stages[1] = nn.Sequential(stages[1], Hiding())
    run = pipeline(stages, schedule, loss_fn=lambda output, target: mse(output.logits, target))
    x, y = data(8)
    run.step(x, target=y)
    with pytest.raises(PipelineError, match="the outputs have a SimpleNamespace, an object with a tensor in it"):
        run.step(x, target=y, return_outputs=True)


@for_each(name=["1f1b", "interleaved", "zb_h1"])
@pytest.mark.ranks(2)
def test_microbatches_of_other_sizes_that_the_loss_s_rank_cannot_weigh_are_refused(name):
    schedule = SCHEDULES[name](2, 4)
    run = pipeline(stages_of(schedule), schedule, loss_fn=lambda output: output.square().mean())
    for rows in (8, 10):
        x, _ = data(rows)
        run.step(x)  # every rank sees how the batch is split
    with pytest.raises(PipelineError, match="microbatch 2 has 2 rows and the first one 3"):
        run.step(*([x] if run.is_first else []))


@pytest.mark.ranks(2)
def test_a_step_that_would_train_nothing_is_refused():
    schedule = one_f_one_b(2, 4)
    x, y = data(8)
    run = pipeline(stages_of(schedule), schedule, loss_fn=lambda output, target: mse(output.detach(), target))
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"would train nothing; call it outside, or call evaluate"),
    ):
        run.step(x, target=y)
    with pytest.raises(PipelineError, match="the loss has no gradient, though the outputs do"):
        run.step(x, target=y)


@for_each(name=TYPICAL)
@pytest.mark.ranks(2)
def test_the_loss_of_a_microbatch_in_which_nothing_counts_may_be_a_constant(name):
    def loss_fn(output, target):
        return mse(output, target) if target.any() else torch.zeros((), dtype=torch.float64)

    x, y = data(8)
    y[2:4] = 0  # the second of four
    check_steps(SCHEDULES[name](2, 4), lambda number: block(5, number), [(x, y)], loss_fn)
