"""The ranks of a job: start them with torch's elastic launcher, or join the ranks of another launcher."""

import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from par_groups import STOP_SIGNALS, block_stop_signals, read_environment

from .._errors import UserError, as_user_error
from ..run.lock import NEAR, SAVED, note_of, read_note
from ..run.output import say
from ..run.stop import exit_code, handled_signals, leave_terminal
from .checks import accelerator_count, check_config, check_output, read_files
from .options import Options
from .rank import join

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_PATIENCE = 120  # seconds to save and leave, before the launcher kills a rank; torch 2.11 always waits 30


def run(options: Options) -> int:
    """Train on new ranks, or as one rank of another launcher.

    Returns:
        The exit code of the process.

    Raises:
        UserError: The options, the text or the output folder cannot be used.
    """
    with as_user_error():
        place = read_environment(os.environ)
    if place.launcher != "single":
        if options.ranks not in ("auto", place.world_size):
            raise UserError(
                f"ranks is {options.ranks}, but {place.launcher} has started {place.world_size}; leave it out"
            )
        check_config(options, place.world_size)
        # `join` never returns: this process becomes the rank, and ends with it.
        join(options)
    ranks = _rank_count(options)
    check_config(options, ranks)
    # The files are checked here as well, so that a mistake costs no start of ranks.
    read_files(options)
    check_output(options)
    return _start(options, ranks)


def _rank_count(options: Options) -> int:
    """Return the number of ranks to start."""
    gpus = accelerator_count() if options.device == "auto" else 0
    if options.ranks == "auto":
        return gpus or 2
    if gpus and options.ranks > gpus:
        raise UserError(f"ranks is {options.ranks}, but there are {gpus} GPUs; start fewer, or use --device cpu")
    return options.ranks


def _start(options: Options, ranks: int) -> int:
    """Start the ranks and wait for them."""
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    # The id in the folder's lock file tells this launch from earlier ones.
    launch = uuid.uuid4().hex
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # what ranks inherit until they hear it; the launcher has no answer
    # -P: a folder of text may well hold a file called types.py, which must not be imported instead of Python's own.
    command = ("-P", "-m", "par_train.jobs.rank", json.dumps(asdict(options)), str(os.getpid()))
    try:
        with _quiet_launcher(), block_stop_signals():
            elastic_launch(_launch_config(ranks, launch), sys.executable)(*command)
    except SignalException as error:
        if error.sigval == signal.SIGHUP:
            leave_terminal()
        return _after_signal(error.sigval, options, launch)
    except ChildFailedError as error:
        return _after_failure({rank: failure.exitcode for rank, failure in error.failures.items()})
    return 0


def _launch_config(ranks: int, launch: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415

    known = {field.name for field in fields(LaunchConfig)}
    patience: dict[str, Any] = {"shutdown_timeout": _PATIENCE} if "shutdown_timeout" in known else {}
    # A free port, since several jobs may start on one host. No restarts: a rank that failed has printed its error, and
    # would most likely fail again.
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=launch,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",  # else it looks its own name up, which not every machine can
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # ranks print to this terminal, and no temporary files stay
        signals_to_handle=",".join(each.name for each in handled_signals()),
        **patience,
    )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher's reports of failures and signals, because a rank prints its own."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _after_signal(number: signal.Signals, options: Options, launch: str) -> int:
    """The launcher has forwarded the signal, and the ranks have left: before the first step, or their save failed."""
    note = read_note(options.files)
    if note == note_of(SAVED, launch):
        return exit_code(number)
    near = note == note_of(NEAR, launch)
    how = f"before the last step had come further than {options.checkpoint.tiers[0]}" if near else "without saving"
    say(f"par-train: {number.name}: stopped {how}", sys.stderr)
    return 128 + number


def _after_failure(codes: dict[int, int]) -> int:
    """Return the exit code after a rank has failed. The rank has printed its error."""
    # A mistake of the user that one rank has found: the others were ended by the launcher or wait no more.
    if 2 in codes.values():
        return 2
    for number in STOP_SIGNALS:
        if set(codes.values()) <= {0, 128 + number}:
            return 128 + number
    for rank, code in sorted(codes.items()):
        # Once a rank has failed, the launcher ends the others by SIGTERM, which says nothing about the cause.
        if code < 0 and code != -signal.SIGTERM:
            say(f"par-train: rank {rank} was ended by {signal.Signals(-code).name}", sys.stderr)
    return 1
