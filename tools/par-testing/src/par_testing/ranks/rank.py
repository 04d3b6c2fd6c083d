"""What runs inside a rank: the process group, the test body, and the word about how it ended."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ..accelerator.by_default import ByDefault
from ..accelerator.device import enable
from ..accelerator.ranks import RankDevice
from ..report.outcome import Ending, Outcome
from ..strict.backend import register
from ..strict.clock import Meter
from ..strict.devices import DeviceOfRank
from ..strict.options import Strict
from .isolate import isolate
from .job import HOST, Job
from .load import load


def run_rank(job: Job, pipe: Connection) -> None:
    """The whole life of a rank.

    A rank on which the body has returned waits until it has returned on all: leaving earlier would close connections
    on which another rank may still communicate.
    """
    isolate(job)
    outcome = _run_body(job)
    pipe.send(outcome)
    if outcome.ending is not Ending.PASSED:
        return
    pipe.recv()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # reported to the pytest process, whatever it is
        pipe.send(_outcome_of(error, job.rank))


def _run_body(job: Job) -> Outcome:
    __tracebackhide__ = True
    try:
        with _backend(job):
            if job.init:
                _init_process_group(job)
            function, arguments = load(job.body)
            with ByDefault() if job.by_default else nullcontext():
                _call(function, arguments)
    except BaseException as error:  # reported to the pytest process, whatever it is
        return _outcome_of(error, job.rank)
    return Outcome(rank=job.rank, ending=Ending.PASSED, time=time.monotonic(), headline="returned")


def _backend(job: Job) -> AbstractContextManager[None]:
    """What a rank's device and backend need: nothing, unless they are strict."""
    device = None
    if job.accelerator is not None:
        enable(job.accelerator)
        device = RankDevice()
    if job.referee is None or job.strict is None:
        return nullcontext()
    return strict_backend(job.referee, job.rank, job.strict, device)


@contextmanager
def strict_backend(folder: Path, rank: int, strict: Strict, device: DeviceOfRank | None = None) -> Iterator[None]:
    """Makes the strict backend known in the process of a rank, and lets its clock go on; at the end the referee hears.

    Args:
        folder: Of the referee.
        rank: The number of this process.
        strict: What is enforced.
        device: Its device, which reckons the time of its operators itself.
    """
    player = register(folder, rank, strict, device)
    clock = player.clock if strict.compute is not None and device is None else None
    try:
        with Meter(clock) if clock is not None else nullcontext():
            yield
    except BaseException as error:
        player.end(f"has ended with {type(error).__name__}")
        raise
    player.end("has ended")


def _call(function: Callable[..., object], arguments: dict[str, object]) -> None:
    __tracebackhide__ = True
    result = function(**arguments)
    if result is not None:  # a coroutine, say, whose body has not run at all
        raise TypeError(f"a test returns None, not {type(result).__name__}: an async or generator test cannot run here")


def _init_process_group(job: Job) -> None:
    timeout = timedelta(seconds=job.timeout)
    store: Store
    if job.backend == "fake":
        # Importing it registers the backend with releases of torch that do not do so themselves.
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        store = FakeStore()
    else:
        store = TCPStore(HOST, job.port, timeout=timeout)
    alike = 1 if job.strict is None else job.strict.alike
    dist.init_process_group(
        job.backend, store=store, rank=job.rank * alike, world_size=job.size * alike, timeout=timeout
    )
    if job.backend != "fake":
        _wait_for_all(store, job)


def _wait_for_all(store: Store, job: Job) -> None:
    """Until every rank is connected: one that leaves or dies at once would fail those that still connect to it."""
    if store.add("par_testing/connected", 1) == job.size:
        store.set("par_testing/all_connected", "")
    store.wait(["par_testing/all_connected"])


def _outcome_of(error: BaseException, rank: int) -> Outcome:
    now = time.monotonic()
    info = pytest.ExceptionInfo.from_exception(error)
    ending = _ending_of(error)
    if ending in (Ending.SKIPPED, Ending.XFAILED):
        return Outcome(rank=rank, ending=ending, time=now, headline=str(error))
    first_line = info.exconly().partition("\n")[0]
    return Outcome(
        rank=rank,
        ending=ending,
        time=now,
        headline=f"raised {first_line}",
        details=str(info.getrepr(style="short")),
    )


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, pytest.skip.Exception):
        return Ending.SKIPPED
    if isinstance(error, pytest.xfail.Exception):
        return Ending.XFAILED
    if any(isinstance(cause, RuntimeError) and _PEER_IS_GONE.search(str(cause)) for cause in _causes(error)):
        return Ending.LOST_A_PEER
    return Ending.RAISED


# What gloo, NCCL and TCPStore say when another rank has ended or does not come.
_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|was reset|refused)|broken pipe|socket (closed|timeout)|timed out|wait timeout"
    r"|remote process exited|failed to recv|recvValue failed|sendBytes failed",
    re.IGNORECASE,
)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
