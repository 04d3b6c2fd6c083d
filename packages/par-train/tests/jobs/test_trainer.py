"""The trainer on ranks of its own: pipelines and precisions against plain torch on one device."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from par_data import FolderText
from par_groups import ProcessGroups, Topology, part_of
from par_pipeline.schedules.registry import SCHEDULES
from par_testing import once, storm
from par_train import Strategy
from par_train._errors import TrainingError
from par_train.jobs.byte_gpt import fill_, make_gpt
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.options import DataOptions, ModelOptions, Options, ScheduleOptions, TrainOptions, learning_rate
from par_train.jobs.trainer import Trainer, make_optimizer, spread

WHOLE_BACKWARDS = ["gpipe", "1f1b", "interleaved", "looped_bfs"]
SPLIT_BACKWARDS = ["zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"]
PRECISIONS = ["bf16", "bf16-amp", "fp16", "fp16-amp", "bf16-sr", "fp8"]
STEPS = 2
WINDOWS = 16  # for validation: two batches
TOLERANCE = 1e-5  # relative; float32 sums over microbatches in another order


def text():
    generator = torch.Generator().manual_seed(0)
    data = bytes((torch.randint(0, 9, (5000,), generator=generator).cumsum(0) % 97 + 1).tolist())  # 0 is padding
    return FolderText(folder=Path("none"), files=1, train=data[:4000], held_out=data[4000:])


def packed_text():
    """The same with documents, some of which have a byte or two, some more than fit into a row."""
    whole, lengths = text(), [1, 23, 2, 5, 1, 1, 16, 9, 40, 3]
    documents = tuple(
        np.array([*(len(part) // sum(lengths) * lengths), rest]) if (rest := len(part) % sum(lengths)) else None
        for part in (whole.train, whole.held_out)
    )
    return replace(whole, documents=documents)


def options(**changes):
    model = ModelOptions(width=16, layers=4, heads=2, context=16, tied=changes.pop("tied", False))
    train = TrainOptions(steps=20, batch_size=8, warmup_steps=1, learning_rate=1e-2)
    return Options(model=model, train=train, **{"data": DataOptions(validation_windows=WINDOWS), **changes})


def trained(chosen, groups, steps=STEPS):
    """A trainer after some steps, and what they gave."""
    trainer = trainer_of(chosen, groups)
    return trainer, [trainer.advance(next(iter(trainer.loader))) for _ in range(steps)]


def trainer_of(chosen, groups, text=None):
    return Trainer(chosen, text_rows(chosen, text or text_of(chosen)), groups, torch.device("cpu"))


def text_of(chosen):
    return text() if chosen.data.packing == "auto" else packed_text()


def loss_of(model, rows):
    """The mean loss over all targets of some rows, of which each document is computed separately."""
    sums, count = [], 0
    for row in rows:
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["labels"])]
        for begin, end in pairwise(starts):
            ids, labels = row["input_ids"][begin:end], row["labels"][begin + 1 : end]
            if (labels >= 0).any():
                sums.append(cross_entropy(model(ids[None])[0, :-1], labels, reduction="sum"))
                count += len(labels)
    return torch.stack(sums).sum() / count


def expected(chosen):
    """The same on one device, in plain torch: model, losses, norms and validation loss."""
    return once(trained_alone, chosen)


def trained_alone(chosen):
    model, data = fill_(make_gpt(chosen.model), chosen.seed), text_rows(chosen, text_of(chosen))
    optimizer = make_optimizer(model, chosen.train)
    losses, norms = [], []
    for step in range(STEPS):
        batch = chosen.train.batch_size
        loss = loss_of(model, [data.train[0, row] for row in range(step * batch, (step + 1) * batch)])
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), chosen.train.clip_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(chosen, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        held_out = [data.held_out[0, int(row)] for row in spread(data.held_out.count(0), WINDOWS)]
        return model, losses, norms, loss_of(model, held_out).item()


@pytest.mark.ranks(2)
def test_trainer_with_lanes_has_one_digest_on_every_axis():
    model = ModelOptions(width=64, layers=2, heads=2, context=16)
    chosen = replace(options(numerics="canonical", lanes=4, tensor_lanes=2, sequence_lanes=2), model=model)
    digests = set()
    for parallel in ({}, {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, {"sequence": 2}):
        with ProcessGroups(Topology.from_config(parallel, 2)) as groups:
            trainer, _ = trained(chosen, groups)
            digests.add(str(trainer.strategy.digest(trainer.model)))
    assert len(digests) == 1


def assert_same_curve(trainer, results, reference):
    _, losses, norms, validation = reference
    assert [each.loss for each in results] == pytest.approx(losses, rel=TOLERANCE)
    assert [each.gradient_norm for each in results] == pytest.approx(norms, rel=TOLERANCE)
    assert trainer.validate() == pytest.approx(validation, rel=TOLERANCE)


def assert_same_run(trainer, results, reference):
    assert_same_curve(trainer, results, reference)
    model, *_ = reference
    whole = dict(model.named_parameters())
    own = dict(trainer.model.named_parameters())
    assert own
    for name, parameter in own.items():
        part = part_of(parameter)
        if part.shape == whole[name].shape:  # no part of tensor parallelism, or of stage 3
            # Adam divides by the size of a gradient: where that is a rounding error, a hundredth of a step may differ.
            torch.testing.assert_close(part, whole[name], rtol=1e-3, atol=3e-4)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("schedules", "tied"),
    [
        (["1f1b", "interleaved", "zb_h1", "zb_v"], True),
        (["zb_v"], False),
        storm(WHOLE_BACKWARDS, True),
        storm(SPLIT_BACKWARDS, True),
    ],
    ids=["one of a kind", "untied", "whole backwards", "split backwards"],
)
def test_every_schedule_trains_as_one_device_does(schedules, tied):
    """With a table that the ends share, which is one message more: on two ranks, or on one where the ends meet."""
    reference = expected(options(tied=tied))
    for name in schedules:
        with ProcessGroups(Topology.from_config({"pipeline": 2}, 2)) as groups:
            chosen = options(tied=tied, pipeline=ScheduleOptions(schedule=name, microbatches=4))
            assert_same_run(*trained(chosen, groups), reference)


SHARED = [(0, "1f1b"), (1, "zb_v"), (2, "1f1b"), (2, "zb_v"), (3, "1f1b"), (3, "interleaved")]
TYPICAL = [(2, "zb_v"), (3, "interleaved")]


@pytest.mark.parametrize("cases", [TYPICAL, pytest.param(SHARED, marks=pytest.mark.storm)], ids=["typical", "all"])
@pytest.mark.ranks(4, timeout=120)
def test_pipelines_of_replicas_that_share_their_state(cases):
    """At stages 1 and 2 too a backward comes in two parts; stage 3 has none that do."""
    reference = expected(options(tied=True))
    for zero, name in cases:
        with ProcessGroups(Topology.from_config({"pipeline": 2}, 4)) as groups:
            chosen = options(tied=True, zero=zero, pipeline=ScheduleOptions(schedule=name, microbatches=3))
            assert_same_run(*trained(chosen, groups), reference)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_a_pipeline_of_cut_layers():
    reference = expected(options(tied=True))
    with ProcessGroups(Topology.from_config({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 4)) as groups:
        chosen = options(tied=True, zero=1, pipeline=ScheduleOptions(schedule="zb_h1"))
        assert_same_run(*trained(chosen, groups), reference)


IN_SEQUENCE = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
CUT = [
    ({"sequence": {"size": 2, "mode": "gather"}, **IN_SEQUENCE}, {"tied": True}),
    ({"sequence": {"size": 2, "mode": "ring"}, "pipeline": 2}, {"tied": True}),
    ({"sequence": {"size": 2, "mode": "ulysses"}}, {"zero": 3}),
    ({"sequence": {"size": 4, "mode": "2d", "ulysses": 2}}, {"zero": 1}),
]


@pytest.mark.parametrize("cases", [CUT[:1], pytest.param(CUT, marks=pytest.mark.storm)], ids=["one", "all"])
@pytest.mark.ranks(4, timeout=120)
def test_windows_that_are_cut_over_sequence_ranks(cases):
    """Alone, and beside data ranks, cut layers and stages."""
    for axes, changes in cases:
        reference = expected(options(tied=changes.get("tied", False)))
        with ProcessGroups(Topology.from_config(axes, 4)) as groups:
            compare = assert_same_curve if changes.get("zero") == 3 else assert_same_run  # parameters are in parts
            compare(*trained(options(**changes), groups), reference)


@pytest.mark.ranks(2)
def test_windows_that_do_not_divide_are_filled_up():
    chosen = options()
    chosen = replace(chosen, model=replace(chosen.model, context=15))
    reference = expected(chosen)
    with ProcessGroups(Topology.from_config({"sequence": 2}, 2)) as groups:
        assert_same_run(*trained(chosen, groups), reference)


PACKED = [
    ({}, {"zero": 2}),
    ({"sequence": {"size": 2, "mode": "ring"}, "pipeline": 2}, {"tied": True}),
    ({"sequence": {"size": 2, "mode": "gather"}, **IN_SEQUENCE}, {}),
    ({"sequence": {"size": 4, "mode": "2d", "ulysses": 2}}, {"zero": 1}),
    ({"sequence": {"size": 2, "mode": "ulysses"}}, {"zero": 3}),
    ({"sequence": {"size": 2, "mode": "gather"}, "tensor": {"size": 2, "mode": "1d"}}, {"tied": True}),
    ({"pipeline": 2}, {"zero": 1, "pipeline": ScheduleOptions(schedule="zb_v")}),
    ({"tensor": {"size": 4, "mode": "2d"}}, {}),
    ({"pipeline": 2, **IN_SEQUENCE}, {}),
]


def packed(packing="whole", **changes):
    return options(data=DataOptions(validation_windows=WINDOWS, packing=packing), **changes)


@pytest.mark.parametrize(
    ("packing", "cases"),
    [
        ("whole", PACKED[1:2]),
        pytest.param("whole", PACKED, marks=pytest.mark.storm),
        pytest.param("stream", PACKED, marks=pytest.mark.storm),
    ],
    ids=["one", "all", "all, stream"],
)
@pytest.mark.ranks(4, timeout=300)
def test_documents_in_rows_train_as_each_of_them_alone(packing, cases):
    """Over data, sequence and tensor ranks and stages, whose microbatches differ in their documents."""
    for axes, changes in cases:
        reference = expected(packed(packing, tied=changes.get("tied", False)))
        with ProcessGroups(Topology.from_config(axes, 4)) as groups:
            compare = assert_same_curve if changes.get("zero") == 3 else assert_same_run  # parameters are in parts
            compare(*trained(packed(packing, **changes), groups), reference)


def test_documents_in_rows_on_one_device():
    with Strategy(), ProcessGroups(Topology.from_config({}, 1)) as groups:
        for packing in ("whole", "stream"):
            assert_same_run(*trained(packed(packing), groups), expected(packed(packing)))


@pytest.mark.storm
@pytest.mark.ranks(8, timeout=300)
def test_documents_in_rows_over_eight_ranks():
    reference = expected(packed())
    for axes in (
        {"sequence": {"size": 2, "mode": "gather"}, "tensor": {"size": 4, "mode": "2d"}},
        {"data": 2, "pipeline": 2, "sequence": {"size": 2, "mode": "ring"}},
        {"pipeline": 2, "sequence": {"size": 2, "mode": "ring"}, **IN_SEQUENCE},
    ):
        with ProcessGroups(Topology.from_config(axes, 8)) as groups:
            assert_same_run(*trained(packed(), groups), reference)


@pytest.mark.storm  # the job of existing models resumes packed rows like this every day
@pytest.mark.ranks(4, timeout=300)
def test_packed_rows_resume_with_and_without_sequence_ranks(tmp_path):
    with ProcessGroups(Topology.from_config({}, 4)) as groups:
        _, whole = trained(packed(tied=True), groups, steps=3 * STEPS)
    losses = [each.loss for each in whole]
    for number, (axes, changes) in enumerate(PACKED):
        there = axes, {**changes, "tied": True}
        found, path = [], tmp_path / str(number)
        for axes_then, changes_then in (there, ({}, {"tied": True}), there):
            with ProcessGroups(Topology.from_config(axes_then, 4)) as groups:
                trainer = trainer_of(packed(**changes_then), groups)
                trainer.strategy.resume(path)
                found += [trainer.advance(next(iter(trainer.loader))).loss for _ in range(STEPS)]
                save(path, trainer)
        assert found == pytest.approx(losses, rel=TOLERANCE), axes


@pytest.mark.ranks(2)
def test_a_batch_of_documents_of_one_byte_changes_nothing():
    """There is nothing to learn in it: its loss is 0, and its step is skipped."""
    whole = text()
    alone = replace(whole, documents=tuple(np.ones(len(part), np.int64) for part in (whole.train, whole.held_out)))
    for axes in ({"sequence": 2}, {"pipeline": 2}):
        with ProcessGroups(Topology.from_config(axes, 2)) as groups:
            trainer = trainer_of(packed(), groups, alone)
            before = [each.clone() for each in trainer.model.parameters()]
            result = trainer.advance(next(iter(trainer.loader)))
            assert (result.loss, result.skipped) == (0.0, True), axes
            assert all(map(torch.equal, before, trainer.model.parameters())), axes


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("axes", "precisions"),
    [
        ({"data": 2}, ["bf16-sr"]),
        ({"pipeline": 2}, ["fp16"]),
        pytest.param({"data": 2}, PRECISIONS, marks=pytest.mark.storm),
        pytest.param({"pipeline": 2}, PRECISIONS, marks=pytest.mark.storm),
    ],
    ids=["data", "pipeline", "data, all", "pipeline, all"],
)
def test_every_precision_trains_about_as_fp32_does(axes, precisions):
    """After 8 steps; 3 % is some 30 roundings of bf16."""
    losses = {}
    for name in ("fp32", *precisions):
        with ProcessGroups(Topology.from_config(axes, 2)) as groups:
            _, results = trained(options(precision=name), groups, steps=8)
            assert not any(each.skipped for each in results), name
            losses[name] = results[-1].loss
            assert losses[name] < 0.95 * results[0].loss, name
            assert losses[name] == pytest.approx(losses["fp32"], rel=0.03), name


def save(path, trainer):
    trainer.strategy.checkpoint(path, step=trainer.step)
    dist.barrier()


TOPOLOGIES = [
    ({}, {"zero": 3}),
    ({"tensor": {"size": 4, "mode": "2d"}}, {}),
    ({"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, {"zero": 1}),
    ({"pipeline": 2}, {"pipeline": ScheduleOptions(schedule="zb_v")}),
    ({"sequence": {"size": 2, "mode": "ring"}}, {"zero": 2}),
]


@pytest.mark.storm  # the job of existing models resumes under other axes every day, and so does a strategy
@pytest.mark.ranks(4, timeout=120)
def test_run_resumes_under_another_topology(tmp_path):
    """Parameters in parts, layers cut in two dimensions, replicas of layers cut in one, stages, parts of a window."""
    with ProcessGroups(Topology.from_config({}, 4)) as groups:
        _, whole = trained(options(tied=True), groups, steps=2 * STEPS)
    losses = [each.loss for each in whole]
    for number, (axes, changes) in enumerate(TOPOLOGIES):
        with ProcessGroups(Topology.from_config(axes, 4)) as groups:
            trainer, begun = trained(options(tied=True, **changes), groups)
            save(tmp_path / str(number), trainer)
        other_axes, other_changes = TOPOLOGIES[number - 1]
        with ProcessGroups(Topology.from_config(other_axes, 4)) as groups:
            trainer = trainer_of(options(tied=True, **other_changes), groups)
            trainer.strategy.resume(tmp_path / str(number))
            gone_on = [trainer.advance(next(iter(trainer.loader))) for _ in range(STEPS)]
        assert [each.loss for each in (*begun, *gone_on)] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_half_precision_goes_on_exactly(tmp_path):
    """Masters, moments and the loss scale come back: with the very same weights as a run that nobody stopped."""
    with ProcessGroups(Topology.from_config({}, 2)) as groups:
        whole = trainer_of(options(precision="fp16"), groups)
        whole.optimizer.scaling.scale.value.fill_(2.0**10)  # of which a new run knows nothing
        for _ in range(3):
            whole.advance(next(iter(whole.loader)))
        save(tmp_path, whole)
        again = trainer_of(options(precision="fp16"), groups)
        again.strategy.resume(tmp_path)
        assert float(again.optimizer.scaling.scale.value) == 2.0**10
        for trainer in (whole, again):
            for _ in range(3):
                trainer.advance(next(iter(trainer.loader)))
        assert all(torch.equal(*each) for each in zip(whole.model.parameters(), again.model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_a_scale_that_is_too_large_is_agreed_on_and_the_step_is_said_to_be_skipped():
    with ProcessGroups(Topology.from_config({}, 2)) as groups:
        trainer = trainer_of(options(precision="fp16"), groups)
        before = [each.clone() for each in trainer.model.parameters()]
        trainer.optimizer.scaling.scale.value.fill_(2.0**24)
        result = trainer.advance(next(iter(trainer.loader)))
        assert result.skipped
        assert all(torch.equal(*each) for each in zip(before, trainer.model.parameters(), strict=True))
        assert float(trainer.optimizer.scaling.scale.value) == 2.0**23


def test_no_schedule_is_forgotten_here():
    own = {name for name in SCHEDULES.names() if SCHEDULES[name].__module__.startswith("par_pipeline.")}
    assert own == {*WHOLE_BACKWARDS, *SPLIT_BACKWARDS}


@pytest.mark.ranks(2)
def test_validation_windows_that_replicas_cannot_share_evenly():
    """Stage 3 gathers in each forward, so all must make as many."""
    found = []
    for zero in (0, 3):
        with ProcessGroups(Topology.from_config({}, 2)) as groups:
            data = DataOptions(validation_windows=9)
            trainer = trainer_of(options(zero=zero, data=data), groups)
            found.append(trainer.validate())
    assert found[0] == pytest.approx(found[1], rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_a_loss_that_is_no_number_on_one_rank_alone_is_told_with_its_rank():
    with ProcessGroups(Topology.from_config({}, 2)) as groups:
        trainer = trainer_of(options(), groups)
        run = trainer.strategy.execute_pipeline

        def spoiled(*given):
            loss = run(*given)
            return loss * float("nan") if dist.get_rank() == 1 else loss

        trainer.strategy.execute_pipeline = spoiled
        with pytest.raises(TrainingError, match="the loss became nan at step 1 on rank 1 alone; lower"):
            trainer.advance(next(iter(trainer.loader)))
