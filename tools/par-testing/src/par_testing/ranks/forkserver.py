"""The process from which every rank is forked, with all slow imports already done.

The workers of pytest-xdist share one. Its imports take some 15 s of a core and half a gigabyte, which each worker would
spend again for the same modules.
"""

import fcntl
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from typing import Any

import pytest

from .job import Module

PRELOAD = (
    "multiprocessing.popen_forkserver",  # which unpickling a rank imports
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.testing._internal.distributed.fake_pg",
)

MODULES = "PAR_TESTING_MODULES"
"""Environment variable of the server: a file with the pickled path of ranks and the test modules to import."""


def start_forkserver(also: Sequence[str], modules: Sequence[Module] = (), run: str | None = None) -> ForkServerContext:
    """Starts the server unless it runs, and waits until it has imported everything.

    Waiting here keeps the seconds of import out of the first test's timeout.

    Args:
        also: Names of modules to import beside the usual ones; names that cannot be imported are skipped.
        modules: Test modules to import: a rank would otherwise take 0.1 s to 2 s for one and what it imports.
        run: What names this run of pytest to all of its workers, which share a server; None for a server of one's own.

    Returns:
        The multiprocessing context whose processes are the server's children.
    """
    context = multiprocessing.get_context("forkserver")
    if run is None:
        _start(context, also, modules)
        return context
    with file_of(run).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed: who comes second waits for the imports, once
        file.seek(0)
        if not _join(file.read()):
            _start(context, also, modules)
            file.truncate(0)
            file.write(pickle.dumps((os.getpid(), _state())))
    return context


def file_of(run: str) -> Path:
    """The file by which the workers of a run of pytest find their server."""
    return Path(tempfile.gettempdir()) / f"par-testing-forkserver-{run}"


def _start(context: ForkServerContext, also: Sequence[str], modules: Sequence[Module]) -> None:
    """Starts a server that is this process's child."""
    context.set_forkserver_preload([*PRELOAD, *also, "par_testing.ranks.warm"])
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile(prefix="par-testing-") as file:
        path = get_preparation_data("rank")["sys_path"]  # that of a rank
        file.write(pickle.dumps((path, list(modules))))
        file.flush()
        patch.setenv(MODULES, file.name)
        # A process that asked the CUDA runtime whether there is a GPU, as modules do for a skipif, could fork no rank
        # that uses one; this makes torch ask the driver's own library.
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # Thread pools are sized when libraries are loaded, so this must be the server's environment.
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
        first = context.Process(target=_do_nothing)
        first.start()
        first.join()
        first.close()


_ALIVE = "_forkserver_alive_fd"


def _state() -> dict[str, Any]:
    """What this process knows of the server: its address, the pipe that keeps it alive, and in 3.14 its key."""
    server: Any = forkserver._forkserver
    names = ("_forkserver_address", _ALIVE, "_forkserver_authkey")
    return {name: getattr(server, name) for name in names if hasattr(server, name)}


def _join(written: bytes) -> bool:
    """Makes another process's server this one's too; returns whether it could."""
    if not written:
        return False
    pid, state = pickle.loads(written)  # noqa: S301 - as a worker of this run wrote it
    try:
        # The server ends when nobody holds its pipe: a hold of one's own lets the process that started it end first.
        state[_ALIVE] = os.open(f"/proc/{pid}/fd/{state[_ALIVE]}", os.O_WRONLY)
    except OSError:  # that process has ended, or this system has no such folder
        return False
    server: Any = forkserver._forkserver
    vars(server).update(state)
    server.ensure_running = _do_nothing  # it would wait for a child, which this server is not
    return True


def _do_nothing() -> None:
    """The body of a process that only proves that the server answers; and stands for what needs no doing."""
