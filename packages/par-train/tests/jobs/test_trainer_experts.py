"""The byte GPT with experts in the place of its MLPs: as on one device, wherever experts lie."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import default_collate

from par_data import FolderText
from par_groups import ProcessGroups, Topology
from par_layers import RouterLosses, update_correction_bias_
from par_testing import once, storm
from par_train.jobs.byte_gpt import fill_, load_model, make_gpt
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.options import DataOptions, ModelOptions, Options, ScheduleOptions, TrainOptions, learning_rate
from par_train.jobs.trainer import Trainer, make_optimizer
from par_train.run.metrics import load_of

STEPS = 20
TOLERANCE = 1e-5  # relative; float32 sums over ranks and microbatches in another order
MIXTURE = {"experts": 4, "top_k": 2, "expert_hidden": 24, "shared": 1, "score": "sigmoid", "bias_rate": 1e-3, "z": 1e-3}
FOLDED = {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}
IN_SEQUENCE = {"size": 2, "mode": "1d", "sequence_parallel": True}


def text():
    generator = torch.Generator().manual_seed(0)
    data = bytes((torch.randint(0, 9, (5000,), generator=generator).cumsum(0) % 97 + 1).tolist())
    return FolderText(folder=Path("none"), files=1, train=data[:4000], held_out=data[4000:])


def options(**changes):
    model = ModelOptions(width=16, layers=2, heads=2, context=16, **MIXTURE)
    train = TrainOptions(steps=STEPS, batch_size=8, warmup_steps=1, learning_rate=3e-3)
    return Options(model=model, train=train, data=DataOptions(validation_windows=16), **changes)


def alone():
    """The model on one device in plain torch: itself, and the losses, norms and imbalances of all steps."""
    chosen = options()
    model, data = fill_(make_gpt(chosen.model), chosen.seed), text_rows(chosen, text())
    optimizer, routers, found = make_optimizer(model, chosen.train), RouterLosses(model), []
    for step in range(STEPS):
        batch = default_collate([data.train[0, row] for row in range(8 * step, 8 * step + 8)])
        logits = model(batch["input_ids"])
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), chosen.train.clip_norm)
        update_correction_bias_(model)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(chosen, step + 1)
        optimizer.step()
        optimizer.zero_grad()
        said = routers.take()
        found.append([loss.item(), norm.item(), *(said[name].item() for name in ("aux", "z", "imbalance"))])
    return model, found


def reference():
    return once(alone)


def trainer_of(chosen, groups, given=None):
    return Trainer(chosen, text_rows(chosen, given or text()), groups, torch.device("cpu"))


def numbers(result):
    return [result.loss, result.gradient_norm, *(result.routers[name] for name in ("aux", "z", "imbalance"))]


def check_trains_as_alone(axes, expected, **changes):
    model, found = expected
    with ProcessGroups(Topology.from_config(axes, dist.get_world_size())) as groups:
        trainer = trainer_of(options(**changes), groups)
        results = [numbers(trainer.advance(next(iter(trainer.loader)))) for _ in range(STEPS)]
        torch.testing.assert_close(results, found, rtol=TOLERANCE, atol=0.0, msg=lambda m: f"{axes} {changes}: {m}")
        load = load_of(trainer.strategy.expert_load(trainer.model))
        assert sorted(load) == ["blocks.0.mixture.gate", "blocks.1.mixture.gate"]
        assert [sum(each) for each in load.values()] == pytest.approx([4.0, 4.0], abs=4e-3), "three digits"
        buffers = dict(model.named_buffers())
        for name, buffer in trainer.model.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], rtol=0.0, atol=1e-6, msg=lambda m, name=name: name + m)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize(
    ("axes", "zero"),
    [(FOLDED, 3), storm({"expert": 2}, 1), storm({"pipeline": 2}, 0)],
    ids=str,
)
def test_a_gpt_with_experts_trains_for_twenty_steps_as_on_one_device(axes, zero):
    check_trains_as_alone(axes, reference(), zero=zero, pipeline=ScheduleOptions(microbatches=4))


FOUR = [
    ({"expert": 2}, {"zero": 0}),
    ({"expert": 2}, {"zero": 2}),
    ({"expert": 4}, {"zero": 3}),
    (FOLDED, {"zero": 1}),
    ({**FOLDED, "expert": {"size": 4, "tensor": 1}}, {"zero": 3}),
    ({"expert": {"size": 2, "tensor": 2}, "tensor": IN_SEQUENCE}, {"zero": 2}),
    ({"expert": 2, "sequence": {"size": 2, "mode": "ring"}}, {"zero": 1}),
    ({"expert": {"size": 2, "tensor": 1}, "sequence": {"size": 2, "mode": "gather"}}, {"zero": 3}),
    ({"expert": {"size": 4, "tensor": 1}, "sequence": {"size": 2, "mode": "gather"}, "tensor": IN_SEQUENCE}, {}),
    ({"expert": 2, "pipeline": 2}, {"zero": 1, "pipeline": ScheduleOptions(schedule="zb_h1", microbatches=2)}),
    ({**FOLDED, "pipeline": 2}, {"zero": 2, "pipeline": ScheduleOptions(schedule="1f1b", microbatches=4)}),
    ({"expert": 2}, {"recompute": "layers"}),
]


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize(("axes", "changes"), FOUR, ids=str)
def test_experts_beside_every_axis_train_as_on_one_device(axes, changes):
    check_trains_as_alone(axes, reference(), **changes)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_a_run_goes_on_under_another_expert_parallelism_and_opens_on_one_device(tmp_path):
    _, found = reference()
    losses = []
    for axes, zero in (({"expert": 2}, 1), (FOLDED, 3), ({"pipeline": 2}, 0), ({}, 2)):
        with ProcessGroups(Topology.from_config(axes, 2)) as groups:
            trainer = trainer_of(options(zero=zero), groups)
            trainer.strategy.resume(tmp_path)
            losses += [numbers(trainer.advance(next(iter(trainer.loader))))[0] for _ in range(3)]
            form = trainer.recipe.format(trainer.model, ExitStack())
            trainer.strategy.checkpoints(tmp_path).save(trainer.step, format=form)
            dist.barrier()
    assert losses == pytest.approx([each[0] for each in found[:12]], rel=TOLERANCE)
    model = load_model(tmp_path / "step-00000012")
    bias = model.blocks[0].mixture.gate.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert bias.abs().max() > 0


@pytest.mark.ranks(2)
def test_padding_of_packed_rows_counts_in_no_balance():
    chosen = options()
    chosen = replace(chosen, data=DataOptions(validation_windows=16, packing="whole"))
    whole = text()
    documents = tuple(torch.full((len(part) // 5,), 5).numpy() for part in (whole.train, whole.held_out))
    with ProcessGroups(Topology.from_config({"expert": 2}, 2)) as groups:
        trainer = trainer_of(chosen, groups, replace(whole, documents=documents))
        trainer.advance(next(iter(trainer.loader)))
        for counts in trainer.strategy.expert_load(trainer.model).values():
            assert int(counts.sum()) == 2 * 8 * 15, "experts of a byte, rows, bytes of three documents"


@pytest.mark.parametrize("sizes", [{"shared": 1}, {"expert_hidden": 24, "score": "sigmoid", "bias_rate": 1e-3}])
def test_the_planner_counts_the_parameters_that_there_are(sizes):
    model = ModelOptions(width=32, layers=2, heads=4, context=32, experts=4, **sizes)
    assert model.shape.parameters == sum(each.numel() for each in make_gpt(model).parameters())
