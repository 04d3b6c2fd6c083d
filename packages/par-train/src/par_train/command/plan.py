"""`par-train plan`: what the config would take, and what would be best. One process, no ranks, no device."""

import json
from pathlib import Path

from par_groups import Topology

from .._errors import UserError
from ..jobs.checks import check_config
from ..jobs.options import Options
from ..plan.options import PEAKS, Job, Machine, shape_of
from ..plan.predict import predict
from ..plan.report import Report
from ..plan.search import rank
from ..strategy.schedules import microbatches_of
from .flags import PlanFlags


def plan(options: Options, flags: PlanFlags) -> int:
    """Prints what the configuration takes, and the best of those that fit.

    Args:
        options: As for a run; without a table `parallel` nothing is compared with the best.
        flags: The machine, and what to print.

    Returns:
        The exit code of the process.

    Raises:
        UserError: A configuration that the devices, the model or the batch do not divide, or a file that cannot be
            written.
    """
    machine = _machine(options, flags)
    topology = check_config(options, flags.world) if options.parallel else None
    shape = shape_of(options)
    job = Job(batch=options.train.batch_size, precision=options.precision)
    try:
        configured = None if topology is None else predict(shape, topology, configured_job(options, topology), machine)
    except ValueError as error:
        raise UserError(str(error)) from None
    report = Report(
        shape=shape,
        world=flags.world,
        job=job,
        machine=machine,
        configured=configured,
        ranking=rank(shape, flags.world, job, machine, flags.top),
    )
    if flags.json:
        _write(Path(flags.json), report)
    print(report.text())
    return 0


def _machine(options: Options, flags: PlanFlags) -> Machine:
    return Machine(
        memory=flags.device_memory,
        flops=flags.flops or PEAKS.get(options.precision, Machine.flops),
        efficiency=flags.efficiency,
        bandwidth=flags.bandwidth,
        network=flags.network,
        latency=flags.latency,
        devices_per_node=flags.devices_per_node,
    )


def configured_job(options: Options, topology: Topology) -> Job:
    """The job as the config has it; a pipeline takes two microbatches a rank unless it says otherwise."""
    ranks = topology.size("pipeline")
    return Job(
        batch=options.train.batch_size,
        zero=options.zero,
        precision=options.precision,
        schedule=options.pipeline.schedule,
        microbatches=microbatches_of(options.pipeline.microbatches, ranks),
    )


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with --json") from None
