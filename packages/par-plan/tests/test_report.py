"""What a plan says: figures, a choice, and reasons."""

import json
from dataclasses import replace
from functools import cache

import pytest

from par_groups import Topology
from par_plan.inputs import Machine, OffloadTiers, TrainingJob
from par_plan.prediction import predict
from par_plan.report import PlanReport, as_dict, describe, table
from par_plan.search import search_configurations
from par_plan.shape import Shape

SHAPE = Shape(layers=8, width=512, heads=8, context=256)
JOB = TrainingJob(batch=64, precision="bf16")


search = cache(search_configurations)  # the same for several tests


def report(world=16, memory=80e9, job=JOB, configured=None, shape=SHAPE, **tiers):
    machine = Machine(memory=memory, tiers=OffloadTiers(**tiers))
    made = None
    if configured is not None:
        parallel, changes = configured
        made = predict(shape, Topology.from_config(parallel, world), replace(job, **changes), machine)
    ranking = search(shape, world, job, machine)
    return PlanReport(shape=shape, world=world, job=job, machine=machine, configured=made, ranking=ranking)


def test_the_table_has_a_line_for_each_and_columns_that_align():
    best = report().ranking.best
    lines = table(best)
    assert len(lines) == 11
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [
        *("data", "pipeline", "tensor", "zero", "schedule", "micro"),
        *("memory", "traffic", "bubble", "step", "bound", "by"),
    ]


def test_the_text_names_what_was_assumed():
    text = report().text()
    for words in ("2.5", "width 512", "16 devices of 80.0 GB", "10% reserved", "400 GB/s", "50.0 GB/s", "10 us"):
        assert words in text, words
    assert "Best configuration of each topology" in text


def test_the_first_is_explained():
    said = report()
    first, shares, following = said.reasons()
    assert first.startswith(describe(said.ranking.best[0]))
    assert "is the fastest" in first
    assert "compute" in shares
    assert "The largest term is" in shares
    assert following.startswith("The second, ")


def test_a_configuration_that_is_slower_is_told_why():
    said = report(configured=({"pipeline": 8}, {"microbatches": 8})).reasons()[-1]
    assert said.startswith("Your configuration takes ")
    assert said.endswith("more of the pipeline bubble.")


def test_a_configuration_that_does_not_fit_is_told_of_what_it_is_full():
    said = report(memory=0.4e9, configured=({}, {}))
    assert said.ranking.best
    assert said.reasons()[-1].startswith("Your configuration does not fit in 360 MB: it needs ")
    assert "activations" in said.reasons()[-1]


def test_the_best_is_told_so():
    best = report().ranking.best[0]
    changes = {"zero": best.job.zero, "schedule": best.job.schedule, "microbatches": best.job.microbatches}
    parallel = as_dict(best)["parallel"]
    assert report(configured=(parallel, changes)).reasons()[-1] == "Your configuration is the fastest."


def test_if_nothing_fits_the_nearest_is_named_and_what_to_change():
    said = report(memory=10e6)
    assert not said.ranking.best
    assert "Nothing fits" in said.text()
    nearest, advice = said.reasons()
    assert describe(said.ranking.nearest) in nearest
    assert "add devices, pass --host-memory to offload, or reduce model.layers" in advice
    assert "host-memory" not in report(memory=10e6, host_memory=1e15).reasons()[-1]
    made = predict(replace(SHAPE, context=65536), said.ranking.nearest.topology, JOB)
    of_activations = replace(said, ranking=replace(said.ranking, nearest=made))
    assert "reduce model.context" in of_activations.reasons()[-1]


def test_one_device_sends_nothing():
    said = report(world=1, memory=1e12).text()
    assert "world    1 device of 1.0 TB" in said
    assert "Traffic of the first" not in said


def test_if_nothing_divides_it_is_said():
    said = report(world=7, shape=Shape(layers=3, width=96, heads=3, context=8), job=TrainingJob(batch=5))
    assert "No configuration of 7 devices divides this model" in said.text()


def test_a_configuration_in_words():
    topology = Topology.from_config({"pipeline": 2, "tensor": {"size": 4, "mode": "1d", "sequence_parallel": True}}, 16)
    made = predict(SHAPE, topology, replace(JOB, zero=1, schedule="zb_h1", microbatches=4))
    assert describe(made) == "data 2 x pipeline 2 x tensor 1d 4 sp, zero 1, zb_h1, 4 microbatches"
    assert describe(predict(SHAPE, Topology.from_config({}, 1), JOB)) == "one device, zero 0"


def test_programs_get_a_config_that_makes_the_same_prediction():
    said = report(configured=({"pipeline": 2}, {"microbatches": 4}))
    found = json.loads(json.dumps(said.as_dict()))
    assert found["model"]["parameters"] == SHAPE.parameters
    assert found["margin"] == 0.1
    for given, made in zip(found["best"], said.ranking.best, strict=True):
        topology = Topology.from_config(given["parallel"], 16)
        job = replace(JOB, zero=given["zero"], **given["pipeline"])
        again = predict(SHAPE, topology, job, said.machine)
        assert again.seconds == given["seconds"]["total"] == made.seconds
        assert again.memory.total == given["memory"]["total"]
        assert sum(each["bytes"] for each in given["traffic"]) == pytest.approx(sum(again.traffic.values()))
    assert found["configured"]["pipeline"] == {"schedule": "1f1b", "microbatches": 4}
    assert found["nearest"] is None
