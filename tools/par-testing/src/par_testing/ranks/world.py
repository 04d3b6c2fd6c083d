"""A fresh world of ranks for one test: start it, wait for it, end it."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

from ..accelerator.options import Accelerator
from ..report.outcome import Ending, Outcome
from ..report.stacks import waits_in_collective
from ..strict.options import Strict
from ..strict.referee import Referee
from .job import Body, Job, launcher_environment
from .process import RankProcess, launched
from .store import host_store

GRACE = 1.0
"""Seconds between the first failure and the end of the other ranks: time for them to fail with a stack themselves."""

COLLECTIVE_SHARE = 0.7
"""The share of the test's timeout after which a collective gives up, so that usually the rank itself raises."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What to run, on how many ranks, and for how long.

    Args:
        body: The body of the test.
        size: The number of ranks.
        timeout: Seconds that the test may take.
        backend: The backend of the default process group.
        init: Whether to initialise torch.distributed.
        dies: The ranks that must be ended by a signal.
        environment: The environment variables of the test.
        filters: The warning filters of the test.
        strict: What is enforced, if the backend is strict.
        accelerator: The strict device of each rank, if it has one.
        by_default: Whether tensors of the test are made on it if the test names no device.
    """

    body: Body
    size: int
    timeout: float
    backend: str
    init: bool
    dies: tuple[int, ...]
    environment: dict[str, str]
    filters: tuple[str, ...]
    strict: Strict | None
    accelerator: Accelerator | None = None
    by_default: bool = False


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A world after its end.

    Args:
        started: When it was started, in seconds of the monotonic clock.
        outcomes: How each rank ended.
        output: What each rank wrote to stdout and stderr.
    """

    started: float
    outcomes: tuple[Outcome, ...]
    output: tuple[str, ...]


def run_world(context: ForkServerContext, world: World) -> Ended:
    """Runs the body on every rank; returns when no process of the world is left."""
    store = host_store(world.timeout)
    with tempfile.TemporaryDirectory(prefix="par-testing-") as name, _referee(world) as referee:
        jobs = _jobs(world, store.port, Path(name), referee)
        started = time.monotonic()
        with launched(context, jobs, world.dies) as ranks:
            outcomes = _supervise(ranks, started + world.timeout)
        output = tuple(_read(job.output) for job in jobs)
    return Ended(started=started, outcomes=tuple(outcomes), output=output)


@contextmanager
def _referee(world: World) -> Iterator[Path | None]:
    """The folder of a referee that this world has, if its backend is strict."""
    if world.strict is None:
        yield None
    else:
        with Referee(world.size, world.strict) as referee:
            yield referee.folder


def _jobs(world: World, port: int, folder: Path, referee: Path | None) -> list[Job]:
    return [
        Job(
            body=world.body,
            rank=rank,
            size=world.size,
            backend=world.backend,
            init=world.init,
            timeout=world.timeout * COLLECTIVE_SHARE,
            port=port,
            environment=world.environment | launcher_environment(rank, world.size, port),
            filters=world.filters,
            output=folder / f"output-{rank}",
            stacks=folder / f"stacks-{rank}",
            referee=referee,
            strict=world.strict,
            accelerator=world.accelerator,
            by_default=world.by_default,
        )
        for rank in range(world.size)
    ]


def _supervise(ranks: Sequence[RankProcess], deadline: float) -> list[Outcome]:
    """Waits for every rank to report, then lets all leave together; cuts short what fails or takes too long."""
    _listen(ranks, deadline, until=lambda rank: rank.outcome is not None)
    if all(rank.outcome is not None and rank.outcome.ending is Ending.PASSED for rank in ranks):
        for rank in ranks:
            rank.let_leave()
        _listen(ranks, deadline, until=lambda rank: not rank.alive)
    return _final_outcomes(ranks)


def _listen(ranks: Sequence[RankProcess], deadline: float, until: Callable[[RankProcess], bool]) -> None:
    """Takes in what the ranks say, until all satisfy `until`, or it is too late for the others."""
    while pending := [rank for rank in ranks if not until(rank)]:
        remaining = _limit(ranks, deadline) - time.monotonic()
        if remaining <= 0:
            return
        ready = wait([source for rank in pending for source in rank.sources], remaining)
        for rank in pending:
            rank.listen(ready)


def _limit(ranks: Sequence[RankProcess], deadline: float) -> float:
    """The deadline, or the end of the grace after the first rank that did not pass."""
    ends = [rank.outcome.time for rank in ranks if rank.outcome and rank.outcome.ending is not Ending.PASSED]
    return min([deadline, *(end + GRACE for end in ends)])


def _final_outcomes(ranks: Sequence[RankProcess]) -> list[Outcome]:
    """The outcome of every rank; those that still run are asked for their stacks."""
    limit = time.monotonic() + 1.0
    outcomes = []
    for rank in ranks:
        if rank.outcome is None:
            outcomes.append(_still_running(rank, limit))
        elif rank.outcome.ending is Ending.DIED:
            outcomes.append(replace(rank.outcome, details=rank.crash_stacks()))
        else:
            outcomes.append(rank.outcome)
    return outcomes


def _still_running(rank: RankProcess, limit: float) -> Outcome:
    now = time.monotonic()
    stacks = rank.dump_stacks(limit)
    waiting = waits_in_collective(stacks)
    return Outcome(
        rank=rank.job.rank,
        ending=Ending.WAITING if waiting else Ending.RUNNING,
        time=now,
        headline="was waiting in a collective" if waiting else "was still running, outside of any collective",
        details=stacks,
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
