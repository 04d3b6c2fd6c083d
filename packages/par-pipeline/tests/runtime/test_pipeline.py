"""A step of a pipeline: what goes in, what comes out, and what is refused."""

import warnings
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import (
    Action,
    Batch,
    LossWeight,
    Pipeline,
    PipelineError,
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
    mse,
    pipeline,
    send_tensors_apart,
    serial,
    stages_of,
)


@pytest.mark.ranks(2)
def test_a_schedule_written_by_hand_may_mix_whole_and_split_backwards():
    text = ["0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0"]
    schedule = Schedule([[Action.parse(each) for each in line.split()] for line in text])
    check_steps(schedule, lambda number: block(5, number), [data(6), data(6, seed=1)])


class Recurrent(nn.Module):
    """A stage whose weights' gradients cannot be put off."""

    def __init__(self, number):
        super().__init__()
        self.inner = block(5, number)
        self.memory = nn.GRU(5, 5).double()

    def forward(self, x):
        return self.memory(self.inner(x))[0]


def mixed_stage(number):
    return Recurrent(number) if number == 1 else block(5, number)


@pytest.mark.cpu(reason="a strict device has no fused GRU cell")
@for_each(name=["zb_h1", "zb_v"])
@pytest.mark.ranks(2)
def test_a_backward_that_cannot_be_split_is_refused_by_name_or_run_whole_with_a_warning(name):
    schedule = SCHEDULES[name](2, 4)
    words = r"the backward of stage 1, which cannot be split: its layer 'memory' is an nn.GRU"
    with pytest.raises(ValueError, match=words + ".*; use a schedule of whole backwards, such as '1f1b', or split_"):
        pipeline(stages_of(schedule, mixed_stage), schedule)
    with pytest.raises(ValueError, match="split_backward is 'maybe'; give 'required' or 'where possible'"):
        pipeline(stages_of(schedule), schedule, split_backward="maybe")
    batches = [tuple(data(8)), tuple(data(8, seed=1))]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check_steps(schedule, mixed_stage, batches, split_backward="where possible")
    assert [str(each.message).count("its layer 'memory' is an nn.GRU") for each in warned] == [1] * (
        1 in schedule.stage_of(dist.get_rank())
    )
    check_steps(SCHEDULES["1f1b"](2, 4), mixed_stage, batches)


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


# Whether a step trains, and its rows. An evaluation comes after one of fewer, as many and more rows, and so does
# training after it; evaluation comes after training of fewer and of more rows, training after training of fewer.
KINDS_OF_STEPS = [
    *((False, rows) for rows in (4, 4, 40, 4)),
    *((True, rows) for rows in (4, 40)),
    *((False, 3), (True, 4), (False, 40), (True, 3)),
]


BUDGETS = [(1, False), (10_000, True), (1 << 28, False)]  # bytes, and whether tensors come apart


@for_each(case=[*product(["1f1b"], BUDGETS), ("interleaved", BUDGETS[1]), ("zb_v", BUDGETS[2])])
@pytest.mark.ranks(2)
def test_receives_are_posted_for_a_step_like_the_last_one_and_serve_any_other(case):
    check_receives_are_posted(*case)


@for_each(case=product(TYPICAL, BUDGETS))
@pytest.mark.storm
@pytest.mark.ranks(2)
def test_receives_are_posted_with_any_budget_in_any_schedule(case):
    check_receives_are_posted(*case)


def check_receives_are_posted(name, budget):
    """Training and evaluation in any order, of any number of rows: results, and both ranks know of every buffer."""
    ahead, apart = budget
    send_tensors_apart(apart)
    schedule = SCHEDULES[name](2, 3)
    stages = stages_of(schedule)
    reference = copied(stages)
    run = pipeline(stages, schedule, transport={"prefetch": ahead})
    for number, (trains, rows) in enumerate(KINDS_OF_STEPS):
        clear([*stages, *reference])
        x, y = data(rows, seed=number)
        expected = serial(reference, x.tensor_split(3), y.tensor_split(3), order=backward_order(schedule))
        if trains:
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
    send_tensors_apart(are_apart=False)


@pytest.mark.ranks(2)
def test_a_weight_of_targets_without_targets_is_refused_on_all_ranks():
    schedule = one_f_one_b(2, 2)
    run = pipeline(stages_of(schedule), schedule, loss_fn=lambda output: output.sum(), weight=LossWeight(of=len))
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
    run = pipeline(stages, schedule, loss_fn=loss_fn, weight=LossWeight(of=lambda target: (target >= 0).sum()))
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
        weight=LossWeight(of=lambda target: (target >= 0).sum(), group=replicas[rank]),
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
    batches = iter([(x, y), [x, y], Batch((x,), {}, y)])
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
