"""Contenders on a GPU that take turns in one process; one that fails is a line of the table, and the others go on."""

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from _turns import quartile, ratio, shuffled

WARM_UPS, TURNS, LEAST = 3, 20, 3  # turns: those that do not count, those that do, and what a slow case has of them
SECONDS = 12.0  # after which a case ends early

Act = Callable[[], object]


class Made(NamedTuple):
    """A contender that is ready: what is timed, and what is called before and after each time, untimed."""

    run: Act
    before: Act = lambda: None
    after: Act = lambda: None


class Taken(NamedTuple):
    """Milliseconds until the GPU was done, and until the call returned; bytes in use beyond what was before."""

    done: float
    returned: float
    peak: int


@dataclass
class Contender:
    """Something to time, and what became of it: bytes that it keeps, a figure for each turn, why there is none."""

    name: str
    make: Callable[[], Made]
    made: Made | None = None
    kept: int = 0
    taken: list[Taken] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A comparison: what several contenders are timed at.

    Args:
        name: The case's name in the table.
        contenders: The first one is what the others are compared with.
        turns: Number of counted turns of each contender; the only warm-up is the one that a contender begins with.
        calls: Number of calls in a turn.
        until_return: Whether the clock stops when the call returns, rather than when the GPU is done.
        gigabytes: Data that one call moves, in gigabytes.
    """

    name: str
    contenders: Sequence[Contender]
    turns: int = TURNS
    calls: int = 1
    until_return: bool = False
    gigabytes: float = 0.0


def measure(case: Case, *, smoke: bool) -> None:
    """All turns of a case. Who fails is left out from then on."""
    for each in case.contenders:
        guarded(each, partial(build, each, case))
    begin = time.perf_counter()
    turns = 2 if smoke else case.turns
    for turn in range(-WARM_UPS if turns == TURNS else 0, turns):
        if turn >= LEAST and time.perf_counter() - begin > SECONDS:
            break
        for each in shuffled([each for each in case.contenders if not each.error], turn):
            guarded(each, partial(take, each, case, counts=turn >= 0))
    for each in case.contenders:
        each.made = None  # makes room for the next case
    gc.collect()


def guarded(contender: Contender, act: Act) -> None:
    """Does something for a contender; whatever it raises is noted there, and the others go on."""
    try:
        act()
    except Exception as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        contender.error = f"{type(error).__name__}: {first[:120]}".replace("|", "/")
        contender.made = None


def build(contender: Contender, case: Case) -> None:
    """Makes a contender, and calls it once, after which it keeps what it will always keep."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    before = allocated()
    contender.made = contender.make()
    take(contender, case, counts=False)
    contender.kept = allocated() - before


def take(contender: Contender, case: Case, *, counts: bool) -> None:
    """Times a contender once."""
    made = contender.made
    if made is None:
        raise RuntimeError(f"{contender.name} is not ready")
    in_use = allocated()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    done, returned = clocked(made, case.calls)
    peak = torch.cuda.max_memory_allocated() - in_use if torch.cuda.is_available() else 0
    if counts:
        contender.taken.append(Taken(done, returned, peak))


def clocked(made: Made, calls: int) -> tuple[float, float]:
    """Milliseconds a call, until the GPU is done and until it returns."""
    made.before()
    synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        made.run()
    returned = time.perf_counter() - begin
    synchronize()
    done = time.perf_counter() - begin
    made.after()
    return 1e3 * done / calls, 1e3 * returned / calls


def row(case: Case, contender: Contender) -> dict[str, object]:
    """A line of the table."""
    taken, reference = contender.taken, case.contenders[0]
    found: dict[str, object] = {"case": case.name, "contender": contender.name, "turns": len(taken)}
    columns = ("median ms", "quartiles ms", "ratio", "returns ms", "GB/s", "peak MB")
    found |= dict.fromkeys(columns, "")
    if contender.error or not taken:
        return found | {"median ms": f"failed: {contender.error}"}
    times = times_of(case, contender)
    found["median ms"] = f"{statistics.median(times):.3f}"
    low, high = (quartile(times, 1), quartile(times, 3)) if len(times) > 4 else (min(times), max(times))
    found["quartiles ms"] = f"{low:.3f} to {high:.3f}"
    found["returns ms"] = f"{statistics.median(each.returned for each in taken):.3f}"
    if not reference.error:
        found["ratio"] = f"{ratio(times, times_of(case, reference)):.2f}"
    if case.gigabytes:
        found["GB/s"] = f"{1e3 * case.gigabytes / statistics.median(times):.1f}"
    if torch.cuda.is_available():
        found["peak MB"] = round((contender.kept + max(each.peak for each in taken)) / 1e6)
    return found


def times_of(case: Case, contender: Contender) -> list[float]:
    """Milliseconds that count."""
    return [each.returned if case.until_return else each.done for each in contender.taken]


def synchronize() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes of GPU memory in use."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
