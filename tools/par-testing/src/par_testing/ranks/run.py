"""One rank test from pytest's side: describe the world, run it, give the verdict."""

import os
import sys
from multiprocessing.context import ForkServerContext
from typing import NoReturn

import pytest

from .._options import RanksOptions
from .._turn import turn
from ..accelerator import build
from ..report.outcome import Ending, Outcome
from ..report.report import describe_failure
from ..strict.options import Strict
from .body import body_of, warning_filters_of
from .world import Ended, World, run_world


def run_on_ranks(item: pytest.Function, options: RanksOptions, size: int, context: ForkServerContext) -> None:
    """Runs the body of `item` on `size` ranks; returns if the test passed.

    Raises:
        pytest.fail.Exception: A rank failed; the message is the whole report.
        pytest.skip.Exception: A rank skipped, and none failed by itself.
    """
    __tracebackhide__ = True
    if options.accelerator is not None:
        if reason := build.why_not():
            raise pytest.skip.Exception(reason, _use_item_location=True)
        build.build()  # here, where a minute of compiling counts towards no rank's timeout
    world = World(
        body=body_of(item),
        size=size,
        timeout=options.timeout,
        backend=options.backend,
        init=options.init,
        dies=options.dies,
        environment=dict(os.environ),
        filters=warning_filters_of(item),
        strict=options.strict or Strict() if options.backend == "strict" else None,
        accelerator=options.accelerator,
        by_default=options.by_default,
    )
    with turn(item.config.rootpath, size):
        ended = run_world(context, world)
    failures = [outcome for outcome in ended.outcomes if outcome.failed]
    given_up = [outcome for outcome in ended.outcomes if outcome.ending in (Ending.SKIPPED, Ending.XFAILED)]
    by_itself = any(outcome.ending in (Ending.RAISED, Ending.DIED) for outcome in failures)
    if given_up and not by_itself:  # the others then only waited for the rank that skipped
        _give_up(given_up[0])
    if failures:
        pytest.fail(describe_failure(ended.outcomes, ended.output, ended.started), pytrace=False)
    _print_output(ended)


def _give_up(outcome: Outcome) -> NoReturn:
    if outcome.ending is Ending.XFAILED:
        pytest.xfail(outcome.headline)
    # The test's own place in pytest's summary, not this line.
    raise pytest.skip.Exception(outcome.headline, _use_item_location=True)


def _print_output(ended: Ended) -> None:
    """Hands the ranks' output on to pytest, which shows it with -s and -rP."""
    for rank, text in enumerate(ended.output):
        for line in text.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
