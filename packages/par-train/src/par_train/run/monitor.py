"""`Monitor`: the watchers of a run: the phases of its time, a profile, goodput and a watchdog."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from par_diagnosis import Activity, CollectiveWaits, Goodput, PhaseClock, StepProfiler, Watchdog, peak_flops_of

from ..strategy.settings import read_steps
from ..strategy.strategy import Strategy
from .files import RunFiles
from .output import say
from .policies import MonitoringPolicy
from .stop import StoppedEarly


class Monitor:
    """The watchers of one run.

    Args:
        strategy: Strategy of the run.
        files: Files of the run.
        policy: What to watch.
        facts: Facts about the run for dumps and trackers, such as its options.
        report_errors: Whether the watchdog reports an error that leaves the run; otherwise the program does.

    Attributes:
        activity: Current activity of this rank, for dumps of a hang, and the facts.
        clock: Seconds that the run spent in each phase.
        profiler: Profiler of the steps that the policy names.
        goodput: Shares of time and model FLOPs; None if the policy requests neither.
    """

    def __init__(
        self,
        strategy: Strategy,
        files: RunFiles,
        policy: MonitoringPolicy,
        facts: Mapping[str, Any],
        *,
        report_errors: bool = True,
    ) -> None:
        self.activity = Activity(dict(facts))
        self.clock = PhaseClock(self.activity)
        self.profiler = StepProfiler(range(0) if policy.profile is None else read_steps(policy.profile), files.trace)
        self.goodput: Goodput | None = None
        if policy.goodput or policy.flops is not None:
            peak = policy.peak_flops or peak_flops_of(strategy.device, strategy.options.precision_name)
            world = None if peak is None else peak * strategy.groups.topology.world_size
            # A GPU's kernels wait for other ranks while the host runs ahead, so only a CPU shows the waiting.
            waits = CollectiveWaits(strategy.groups) if strategy.device.type == "cpu" else None
            self.goodput = Goodput(clock=self.clock, waits=waits, flops=policy.flops, peak=world)
        self._watchdog: Watchdog | None = None
        if policy.diagnose is not None and policy.diagnose > 0:
            self._watchdog = Watchdog(
                files.diagnosis,
                strategy.groups,
                timeout=policy.diagnose,
                report=lambda line: say(line, sys.stderr),
                report_errors=report_errors,
                activity=self.activity,
            )

    def start(self, held: ExitStack) -> None:
        """Start what watches in threads. `held` stops the sampling of waits; `stop` stops the rest."""
        if self.goodput is not None and self.goodput.waits is not None:
            held.enter_context(self.goodput.waits.sampled())
        # `stop` ends it, and not `held`, which is closed without the error that the watchdog has to report.
        if self._watchdog is not None:
            self._watchdog.__enter__()

    def stop(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop watching; an error on this rank is reported with its stack."""
        self.profiler.cancel()
        if self._watchdog is not None:
            is_agreed = isinstance(error, StoppedEarly)  # all ranks raise it together, and nothing has failed
            self._watchdog.__exit__(*(None, None, None) if is_agreed else (kind, error, trace))
