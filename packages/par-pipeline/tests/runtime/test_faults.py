"""What goes wrong on one rank is raised on all, with the place; after `reset()` the next step is right."""

import math
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import Pipeline, PipelineError, Transport, gpipe, one_f_one_b, split_rows
from par_pipeline.wire import inbox
from par_testing import for_each, storm

from ..runtime_helpers import (
    SCHEDULES,
    assert_gradients,
    block,
    clear,
    copied,
    data,
    lanes_of,
    mine,
    mse,
    pipeline,
    send_tensors_apart,
    serial,
    stages_of,
)


class Hidden:
    """Holds a tensor where nobody sees it."""

    def __init__(self, tensor):
        self.tensor = tensor


class Failing(torch.autograd.Function):
    """Calls something in forward, and something in backward."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        act("F")
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        instead = ctx.act("B")
        return g if instead is None else instead, None


class Faulty(nn.Module):
    """A stage in which `act` is called with each op and its count in this step."""

    def __init__(self, number):
        super().__init__()
        self.inner = block(5, number)
        self.fault = None
        self.begin()

    def begin(self):
        self.counts = {"F": 0, "B": 0}

    def act(self, op):
        microbatch, self.counts[op] = self.counts[op], self.counts[op] + 1
        if self.fault is not None and self.fault[:2] == (op, microbatch):
            return self.fault[2]()
        return None

    def forward(self, x):
        return Failing.apply(self.inner(x), self.act)


def boom():
    raise ValueError("a fault on purpose")


@for_each(case=[storm(("1f1b", False)), ("interleaved", True), ("zb_v", False)])
@pytest.mark.ranks([storm(2), 4])
def test_a_stage_that_raises_raises_everywhere_and_after_reset_the_next_step_is_right(case):
    name, apart = case
    send_tensors_apart(apart)
    ranks, microbatches = dist.get_world_size(), 5
    schedule = SCHEDULES[name](ranks, microbatches)
    stages = stages_of(schedule, Faulty)
    run = pipeline(stages, schedule)
    rank = dist.get_rank()
    x, y = data(17)
    faults = [
        (op, stage, count) for op in "FB" for stage in (0, schedule.stages - 1) for count in (0, microbatches - 1)
    ]
    for step, (op, stage, count) in enumerate(faults if ranks == 2 else [faults[i] for i in (1, 7)]):
        if step % 2 == 0:  # with and without shapes that are known from an earlier step
            run.step(x, target=y)
        for each in stages:
            each.begin()
        stages[stage].fault = (op, count, boom)
        with pytest.raises(PipelineError) as raised:
            run.step(x, target=y)
        named = "I" if op == "B" and name.startswith("zb") else op
        where = rf"stage {stage}, microbatch {count}, action {stage}{named}{count} on rank {schedule.rank_of(stage)}: "
        assert re.match(where + "ValueError: a fault on purpose", str(raised.value)), str(raised.value)
        assert (raised.value.__cause__ is not None) == (schedule.rank_of(stage) == rank)
        with pytest.raises(PipelineError, match=r"call reset\(\)"):
            run.step(x, target=y)
        run.reset()
        clear(stages)
        stages[stage].fault = None
        reference = copied(stages)
        run.step(x, target=y)
        serial(reference, x.tensor_split(microbatches), y.tensor_split(microbatches))
        assert_gradients(stages, reference, schedule, exact=False)


@pytest.mark.ranks(3)
def test_a_shape_that_the_next_stage_cannot_take_is_named():
    class Narrow(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner, self.narrow = block(5, number), False

        def forward(self, x):
            return self.inner(x)[:, :3] if self.narrow else self.inner(x)

    schedule = one_f_one_b(3, 4)
    stages = stages_of(schedule, Narrow)
    run = pipeline(stages, schedule)
    x, y = data(8)
    run.step(x, target=y)
    stages[0].narrow = True
    with pytest.raises(PipelineError, match=r"stage 1, microbatch 0, action 1F0 on rank 1: RuntimeError: .*shape"):
        run.step(x, target=y)
    run.reset()
    stages[0].narrow = False
    clear(stages)
    reference = copied(stages)
    run.step(x, target=y)
    serial(reference, x.tensor_split(4), y.tensor_split(4))
    assert_gradients(stages, reference, schedule, exact=True)


@pytest.mark.ranks(2)
def test_a_rank_that_has_no_memory_left_for_what_still_comes_raises_what_it_has_to():
    class Full:
        """torch, on a device that is full."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def empty(self, *args, **kwargs):
            raise torch.OutOfMemoryError("no memory to receive into")

    send_tensors_apart()
    schedule = gpipe(2, 4)
    stages = stages_of(schedule, Faulty)
    run = pipeline(stages, schedule)
    x, y = data(8)

    def fault():
        inbox.torch = Full()
        raise torch.OutOfMemoryError("the activations do not fit")

    stages[1].fault = ("F", 1, fault)
    with pytest.raises(PipelineError, match="action 1F1 on rank 1: OutOfMemoryError: the activations do not fit"):
        run.step(x, target=y)


@pytest.mark.ranks(2)
def test_a_gradient_of_the_wrong_shape_is_named():
    schedule = gpipe(2, 2)
    stages = stages_of(schedule, Faulty)
    run = pipeline(stages, schedule)
    x, y = data(8)
    stages[1].fault = ("B", 1, lambda: torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(PipelineError, match=r"stage 1, microbatch 1, action 1B1 on rank 1: RuntimeError: .*shape"):
        run.step(x, target=y)  # and this rank may leave now


def after_a_step(schedule):
    """Stages that can be at fault, their pipeline, and a batch that went through it."""
    stages = stages_of(schedule, Faulty)
    run = pipeline(stages, schedule)
    x, y = data(8)
    run.step(x, target=y)
    return stages, run, x, y


@pytest.mark.parametrize("when", [("F", 2), ("B", 0)])
@pytest.mark.ranks(3, dies=(1,))
def test_a_rank_that_is_killed_is_named_on_the_others(when):
    stages, run, x, y = after_a_step(one_f_one_b(3, 4))
    for each in stages:
        each.begin()
    stages[1].fault = (*when, lambda: os.kill(os.getpid(), 9))
    with pytest.raises(PipelineError, match=r"stage \d, microbatch \d, action \d[FB]\d on rank \d: .*rank 1 is gone"):
        run.step(x, target=y)


def one_is_killed_between_steps(victim):
    _, run, x, y = after_a_step(gpipe(2, 2))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), 9)
    time.sleep(1)  # it is gone now, and so is the connection
    with pytest.raises(PipelineError, match=f"rank {victim} is gone"):
        run.step(x, target=y)


@pytest.mark.ranks(2, dies=(0,))
def test_a_first_rank_that_is_killed_between_steps_is_named():
    one_is_killed_between_steps(0)


@pytest.mark.ranks(2, dies=(1,))
def test_a_last_rank_that_is_killed_between_steps_is_named():
    one_is_killed_between_steps(1)


@pytest.mark.ranks(3)
def test_a_rank_that_hangs_is_named_within_the_timeout():
    schedule = one_f_one_b(3, 4)
    stages = stages_of(schedule, Faulty)
    limits, waited = [timedelta(hours=1), timedelta(seconds=0.5)], []

    def lanes(group, device, timeout):
        return lanes_of(group, device, timeout)._replace(timeout=limits.pop())

    run = pipeline(stages, schedule, transport={"lanes": lanes})
    x, y = data(8)
    stages[1].fault = ("F", 2, lambda: waited.append(dist.barrier()))  # until the others have given up
    with pytest.raises(PipelineError, match=r"did not answer within 0.5 s|rank \d is gone"):
        run.step(x, target=y)
    if not waited:  # rank 1 has not, if it has given up before
        dist.barrier()
    run.reset()
    stages[1].fault = None
    clear(stages)
    reference = copied(stages)
    run.step(x, target=y)
    serial(reference, x.tensor_split(4), y.tensor_split(4))
    assert_gradients(stages, reference, schedule, exact=True)


@pytest.mark.ranks(3)
def test_a_fault_in_evaluation_is_raised_everywhere():
    schedule = one_f_one_b(3, 4)
    stages = stages_of(schedule, Faulty)
    run = pipeline(stages, schedule)
    x, y = data(8)
    for stage in range(3):
        stages[stage].begin()
        stages[stage].fault = ("F", 3, boom)
        with pytest.raises(PipelineError, match=rf"stage {stage}, microbatch 3, action {stage}F3 on rank {stage}"):
            run.evaluate(x, target=y)
        run.reset()
        stages[stage].fault = None
        outputs = run.evaluate(x, target=y).outputs
        assert (outputs is not None) == run.is_last


@pytest.mark.ranks(2)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank_before_anything_is_sent():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    run = pipeline(stages, schedule)
    x, y = data(8)
    ran = []
    for stage in stages:
        stage.register_forward_hook(lambda *_: ran.append(1))
    for inputs, target, message in [
        (x[:3], y[:3], "a batch of 3 rows is smaller than the 4 microbatches"),
        ((x, x[:5]), y, r"\[5, 8\] rows"),
        (x, y[:6], r"2 rows of inputs, but 1 of the target|2 rows of inputs, but 2"),
    ]:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        with pytest.raises(ValueError, match=message):
            run.step(*given, target=target)
        assert not ran
        run.reset()
    if dist.get_rank() == 0:  # only the first rank has the inputs
        with pytest.raises(ValueError, match="a batch of 3 rows"):
            run.step(x[:3])
    else:
        with pytest.raises(ValueError, match="rank 0: a batch of 3 rows"):
            run.step(target=y)
    assert not ran
    run.reset()
    run.step(x, target=y)


@pytest.mark.ranks(2)
def test_an_error_before_the_first_action_is_named_with_its_type_on_every_rank():
    def split(batch, microbatches):
        raise KeyError("tokens")

    schedule = one_f_one_b(2, 4)
    run = pipeline(stages_of(schedule), schedule, split=split if dist.get_rank() == 0 else split_rows)
    x, y = data(8)
    with pytest.raises(PipelineError, match=r"rank 0, before its first action: KeyError: 'tokens'\. Call reset\(\)"):
        run.step(x, target=y)


@pytest.mark.ranks(2)
def test_what_does_not_fit_together_is_refused_at_construction_on_every_rank():
    group = dist.group.WORLD
    stages = [block(5, number) for number in range(2)]
    rank = dist.get_rank()
    for modules, schedule, options, message in [
        (stages[rank], one_f_one_b(3, 4), {}, "the schedule is for 3 ranks, the group has 2; make a schedule for 2"),
        (stages, one_f_one_b(2, 4), {}, r"rank \d the stages \[\d\], but it was given 2 modules"),
        ([] if rank else stages[0], one_f_one_b(2, 4), {}, r"rank 1 the stages \[1\], but it was given 0 modules"),
        (stages[rank], one_f_one_b(2, 4 + rank), {}, r"ranks \[1\] have another schedule than rank 0"),
        (stages[rank], one_f_one_b(2, 4), {"transport": Transport(timeout=-rank)}, "timeout=0|timeout=-1"),
        (
            stages[rank],
            one_f_one_b(2, 4),
            {"transport": Transport(dtype=torch.int8)},
            "dtype=torch.int8: tensors",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            Pipeline(modules, schedule, group, loss_fn=mse, **options)
    for schedule, options, message in [
        ("1f1b" if rank else one_f_one_b(2, 4), {}, "schedule is '1f1b'; give a Schedule"),
        (one_f_one_b(2, 4), {"shared": object() if rank else ()}, "shared is a object; give a list of Shared"),
        (one_f_one_b(2, 4), {"transport": Transport(dtype="bfloat16" if rank else None)}, "dtype=bfloat16: tensors"),
        (one_f_one_b(2, 4), {"transport": Transport(timeout=math.inf if rank else 1)}, "timeout=inf: seconds"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            Pipeline(stages[rank], schedule, group, loss_fn=mse, **options)
    alone = dist.new_group([0]), dist.new_group([1])
    static = nn.parallel.DistributedDataParallel(stages[rank], process_group=alone[rank], static_graph=rank == 1)
    with pytest.raises(ValueError, match="static_graph=True"):
        Pipeline(static, one_f_one_b(2, 4), group, loss_fn=mse)
    with pytest.raises((TypeError, ValueError), match="a stage is a str"):
        Pipeline(["stage"] if rank else stages[0], one_f_one_b(2, 4), group, loss_fn=mse)
    with pytest.raises((TypeError, ValueError), match="lossfn"):
        Pipeline(stages[rank], one_f_one_b(2, 4), group, lossfn=mse)


@pytest.mark.ranks(2)
def test_a_step_without_a_loss_function_on_the_last_stage_is_refused_on_every_rank():
    schedule = one_f_one_b(2, 4)
    stages = stages_of(schedule)
    run = Pipeline(mine(stages, schedule), schedule, dist.group.WORLD, loss_fn=None if dist.get_rank() else mse)
    x, y = data(8)
    with pytest.raises(ValueError, match="the last stage has none"):
        run.step(x, target=y)
    assert (run.evaluate(x).outputs is not None) == run.is_last


@for_each(name=["1f1b", "zb_h1"])
@pytest.mark.ranks(2)
def test_an_input_that_is_written_into_after_a_layer_has_used_it_is_refused_by_split_backwards_too(name):
    class Overwrites(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

        def forward(self, x):
            y = self.first(x) * 1.0
            z = self.second(y)
            y += 1
            return z

    schedule = SCHEDULES[name](2, 2)
    run = pipeline(stages_of(schedule, Overwrites), schedule)
    x, y = data(8)
    with pytest.raises(PipelineError, match=r"RuntimeError: .*(modified by an inplace|was written into after)"):
        run.step(x, target=y)


@pytest.mark.ranks(2)
def test_a_loss_of_several_numbers_and_a_hidden_tensor_are_refused():
    class Hides(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner, self.hide = block(5, number), number == 0

        def forward(self, x):
            return Hidden(self.inner(x)) if self.hide else self.inner(x)

    x, y = data(8)
    schedule = one_f_one_b(2, 4)
    run = pipeline(stages_of(schedule), schedule, loss_fn=lambda output, target: output - target)
    with pytest.raises(PipelineError, match=r"action 1F0 .*the loss has shape \(2, 5\)"):
        run.step(x, target=y)
    run = pipeline(stages_of(schedule, Hides), schedule)
    with pytest.raises(PipelineError, match=r"action 0F0 .*register its type"):
        run.step(x, target=y)
