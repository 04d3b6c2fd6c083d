"""`par-train plan`: the cost of a config, and the best configurations. One process, without ranks or devices."""

import json
import shutil
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from par_groups import Topology
from par_plan import (
    PEAKS,
    RECOMPUTES,
    Machine,
    OffloadTiers,
    PlannedModel,
    PlanReport,
    TrainingJob,
    predict,
    search_configurations,
)

from .._errors import UserError, as_user_error
from ..jobs.checks import check_config, check_kind
from ..jobs.existing.folder import read_config, row_length
from ..jobs.options import Options, PlanOptions
from ..strategy.settings import microbatches_of

SILENT = 2.0
"""Seconds after which a search shows progress on a terminal."""


def plan(options: Options, plan_options: PlanOptions) -> int:
    """Print the cost of the configuration, and the best configurations that fit.

    Args:
        options: Options of a run; without axes in `parallel`, no configuration is compared with the best.
        plan_options: Machine and output.

    Returns:
        The exit code of the process.

    Raises:
        UserError: The configuration does not divide the devices, the model or the batch, or a file is not writable.
    """
    check_kind(options)
    flops = plan_options.flops
    given = vars(plan_options)  # most options are fields of the machine and of its tiers, under their names
    of_tiers = {each.name: given[each.name] for each in fields(OffloadTiers)}
    of_machine = {each.name: given[each.name] for each in fields(Machine) if each.name in given}
    of_machine |= {
        "memory": plan_options.device_memory,
        "flops": PEAKS.get(options.precision, Machine.flops) if flops == "auto" else flops,
        "tiers": OffloadTiers(**of_tiers),
    }
    machine = Machine(**of_machine)
    _check_recompute(options)
    shape = pretrained_shape(options) if options.model.folder else options.model.shape
    configured = None
    if options.parallel:
        topology = check_config(options, plan_options.world)
        with as_user_error():
            asked = replace(configured_job(options, topology), imbalance=plan_options.imbalance)
            configured = predict(shape, topology, asked, machine)
    job = TrainingJob(batch=options.train.batch_size, precision=options.precision, imbalance=plan_options.imbalance)
    sequence = None if plan_options.sequence == "auto" else plan_options.sequence
    with as_user_error(), _bar() as bar:  # such as a model whose forward cannot be followed
        ranking = search_configurations(
            shape, plan_options.world, job, machine, plan_options.top, sequence=sequence, watch=bar.update
        )
    report = PlanReport(
        shape=shape, world=plan_options.world, job=job, machine=machine, configured=configured, ranking=ranking
    )
    if plan_options.json:
        try:
            Path(plan_options.json).write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot write {plan_options.json}: {error.strerror}; name another file with --json"
            ) from None
    print(report.text())
    return 0


def _bar() -> "tqdm[NoReturn]":
    """Return a progress bar that counts topologies, on a terminal, if the search takes more than `SILENT`."""
    size = shutil.get_terminal_size()  # tqdm shows nothing on a terminal without a size
    return tqdm(
        unit=" topologies",
        delay=SILENT,
        leave=False,
        disable=not sys.stderr.isatty(),
        ncols=size.columns,
        nrows=size.lines,
    )


def pretrained_shape(options: Options) -> PlannedModel:
    """Return the sizes of the transformers model that the options train, from its config.

    Raises:
        UserError: The folder has no config, transformers is not installed, or an adapter is trained.
    """
    from par_layers.pretrained import make_on_meta  # noqa: PLC0415 - other plans do without what it imports
    from par_plan import PretrainedShape  # noqa: PLC0415 - as above

    model, key = options.model, "model.path" if options.model.path else "model.config"
    if options.adapter.rank:
        raise UserError(
            f"adapter.rank is {options.adapter.rank}, and par-train plan knows the training of all weights alone; "
            "leave [adapter] out"
        )
    folder = Path(model.folder).expanduser()
    # A plan needs the config only, so a path of that file is accepted, too.
    folder = folder.parent if folder.name == "config.json" else folder
    context = row_length(options, read_config(folder, key))
    with as_user_error(f"{key} {str(folder)!r}: ", ImportError, KeyError, TypeError):
        made = make_on_meta(str(folder), torch.float32, model.attention or None)
        return PretrainedShape(made, context=context, packed=True)


def _check_recompute(options: Options) -> None:
    """Raise UserError if the planner has no formulas for the recomputation policy."""
    known = ("", "layers") if options.model.folder else RECOMPUTES
    if options.recompute not in known:
        allowed = " and ".join(repr(word) for word in known if word)
        raise UserError(
            f"recompute is {options.recompute!r}, and par-train plan knows {allowed} of this model; use one of these, "
            "or leave it out for the plan"
        )


def configured_job(options: Options, topology: Topology) -> TrainingJob:
    """Return batch, ZeRO stage, precision and schedule of the options for the planner."""
    return TrainingJob(
        batch=options.train.batch_size,
        zero=options.zero,
        precision=options.precision,
        schedule=options.pipeline.schedule,
        recompute=options.recompute,
        microbatches=microbatches_of(options.pipeline.microbatches, topology.size("pipeline")),
    )
