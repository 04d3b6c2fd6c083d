"""The process from which every rank is forked, with all slow imports already done."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest

PRELOAD = (
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
    "par_testing._warm",
)


def start_forkserver(also: Sequence[str]) -> ForkServerContext:
    """Starts the server unless it runs, and waits until it has imported everything.

    Waiting here keeps the seconds of import out of the first test's timeout.

    Args:
        also: Names of modules to import beside the usual ones; names that cannot be imported are skipped.

    Returns:
        The multiprocessing context whose processes are the server's children.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *also])
    with pytest.MonkeyPatch.context() as patch:
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
