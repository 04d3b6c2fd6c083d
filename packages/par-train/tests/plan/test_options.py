"""What the planner proposes and predicts are options that the command takes."""

from contextlib import suppress
from typing import get_args, get_type_hints

from par_plan import NUMBER_WIDTHS, Machine, Shape, TrainingJob
from par_plan.prediction import Predictor
from par_plan.search import configurations, variants
from par_train.jobs.checks import check_config
from par_train.jobs.options import ModelOptions, Options, ScheduleOptions, TrainOptions


def test_options_precision_lists_every_planned_precision():
    assert set(get_args(get_type_hints(Options)["precision"])) == set(NUMBER_WIDTHS)


def test_configurations_of_a_search_pass_the_checks_of_a_run():
    """The main job takes it, and no rank is left over."""
    model = ModelOptions(width=512, layers=8, heads=8, context=256)
    shape, job = Shape(layers=8, width=512, heads=8, context=256), TrainingJob(batch=64, precision="bf16")
    found = []
    for topology, base in configurations(shape, 8, job):
        framed = Predictor(shape, topology, base, Machine())
        for variant in variants(topology, base):
            with suppress(ValueError):  # a schedule that takes other sizes, which a search leaves out
                framed.predict(variant)
                found.append((topology, variant))
    assert len(found) > 100
    for topology, job in found:
        mode, options = topology.modes.get("tensor", (None, {}))
        tensor = {"tensor": {"size": topology.size("tensor"), "mode": mode, **options}} if mode else {}
        chosen = Options(
            model=model,
            train=TrainOptions(batch_size=64),
            zero=job.zero,
            precision=job.precision,
            pipeline=ScheduleOptions(schedule=job.schedule, microbatches=job.microbatches),
            parallel={"pipeline": topology.size("pipeline"), **tensor},
        )
        assert check_config(chosen, 8).axes == topology.axes
