"""The process from which every rank is forked, with all slow imports already done."""

import multiprocessing
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.spawn import get_preparation_data

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


def start_forkserver(also: Sequence[str], modules: Sequence[Module] = ()) -> ForkServerContext:
    """Starts the server unless it runs, and waits until it has imported everything.

    Waiting here keeps the seconds of import out of the first test's timeout.

    Args:
        also: Names of modules to import beside the usual ones; names that cannot be imported are skipped.
        modules: Test modules to import: a rank would otherwise take 0.1 s to 2 s for one and what it imports.

    Returns:
        The multiprocessing context whose processes are the server's children.
    """
    context = multiprocessing.get_context("forkserver")
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
    return context


def _do_nothing() -> None:
    """The body of a process that only proves that the server answers."""
