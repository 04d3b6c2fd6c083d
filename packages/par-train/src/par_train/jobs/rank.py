"""The life of one rank, from its first signal handler to its exit code.

    python -m par_train.jobs.rank OPTIONS_AS_JSON LAUNCHER_PID

is how start.py starts one. torch is imported only after the signal handlers are in place, so that a rank can be
stopped from its first moment on.
"""

import json
import os
import sys
from typing import NoReturn

from par_diagnosis import FailureReported
from par_groups import read_environment

from .._errors import TrainingError, UserError
from ..config.settings import build
from ..run.output import say
from ..run.stop import Stop, StoppedEarly, catch_signals, exit_code, follow_launcher, one_traceback
from .options import Options


def main(arguments: list[str]) -> NoReturn:
    """A rank that the launcher started: this process, until its end."""
    options, launcher = arguments
    # Before torch is imported, which takes seconds in which a signal would kill the rank.
    stop = catch_signals()
    follow_launcher(stop, int(launcher))
    _leave(_live(build(Options, json.loads(options)), stop))


def join(options: Options) -> NoReturn:
    """A rank that torchrun, SLURM or Open MPI started: this process, until its end."""
    stop = catch_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which is the parent; the others' agents end their ranks
        follow_launcher(stop, os.getppid())
    _leave(_live(options, stop))


def print_error(error: UserError | TrainingError) -> None:
    """The one line that an error of all ranks gets; of many ranks, only the master speaks."""
    if is_master():
        say(f"par-train: error: {error}", sys.stderr)


def is_master() -> bool:
    """Whether this process is rank 0, or no rank at all."""
    try:
        return read_environment(os.environ).rank == 0
    except ValueError:  # a half-set environment: everybody may complain
        return True


def _leave(code: int) -> NoReturn:
    """Ends the process without taking the interpreter apart.

    The threads of torch's communication outlive their last collective for a moment. One that asks for an interpreter
    that is no longer there aborts the process, and a run that was done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Buffers are flushed by hand, since os._exit does not.
    os._exit(code)


def _live(options: Options, stop: Stop) -> int:
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "10000")  # operations that torch keeps for the diagnosis of a hang
    try:
        with one_traceback():
            from .job_run import train  # noqa: PLC0415 - slow, and torch's

            return exit_code(train(options, stop))
    except UserError as error:
        print_error(error)
        return 2
    except TrainingError as error:
        print_error(error)
        return 1
    except StoppedEarly as stopped:
        if is_master():
            say(f"par-train: {stopped}", sys.stderr)
        return 128 + stopped.number
    except FailureReported:
        return 1


if __name__ == "__main__":
    main(sys.argv[1:])
