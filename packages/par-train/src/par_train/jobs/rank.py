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
from ..run.stop import Stop, StoppedEarly, catch_signals, follow_launcher, one_traceback
from .options import Options


def main(arguments: list[str]) -> NoReturn:
    """Run a rank that the launcher started, until the process ends."""
    options, launcher = arguments
    # Before torch is imported, which takes seconds in which a signal would kill the rank.
    stop = catch_signals()
    follow_launcher(stop, int(launcher))
    _leave(_live(build(Options, json.loads(options)), stop))


def join(options: Options) -> NoReturn:
    """Run a rank that torchrun, SLURM or Open MPI started, until the process ends."""
    stop = catch_signals()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent; agents of other launchers end their ranks
        follow_launcher(stop, os.getppid())
    _leave(_live(options, stop))


def print_error(error: UserError | TrainingError) -> None:
    """Print an error that all ranks raise, as one line, on rank 0."""
    if is_master():
        say(f"par-train: error: {error}", sys.stderr)


def is_master() -> bool:
    """Return whether this process is rank 0, or no rank."""
    try:
        return read_environment(os.environ).rank == 0
    except ValueError:  # an incomplete environment: any process may print
        return True


def _leave(code: int) -> NoReturn:
    """End the process without the shutdown of the interpreter.

    Threads of torch's communication outlive their last collective for a moment. A thread that needs the interpreter
    after its shutdown aborts the process, and a complete run would count as failed.
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

            return train(options, stop)
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
