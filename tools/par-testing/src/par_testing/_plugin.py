"""The pytest plugin: `@pytest.mark.ranks(n)` runs a test body on every one of n ranks.

Loaded in every run of pytest, so nothing here imports torch before there is a test that needs it.
"""

import errno
import gc
import os
import random
import socket
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from _pytest.unittest import TestCaseFunction

from ._examples import load_profile
from ._options import RanksOptions, ranks
from .accelerator.options import ENVIRONMENT, Accelerator
from .strict.options import Strict

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

    from .commands.warm import WarmPython

_SIZE = "ranks"  # the parameter by which a list of world sizes goes into a test's name
_CONTEXT = pytest.StashKey["ForkServerContext"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds a setting, and the options that run existing tests on strict ranks."""
    parser.addini(
        "ranks_preload",
        "modules to import once, in the process from which ranks are forked (torch and its parts are)",
        type="linelist",
        default=[],
    )
    parser.addoption(
        "--backend",
        choices=["gloo", "strict"],
        default="gloo",
        help="what rank tests run on that name no backend; strict enforces what NCCL would (default: gloo)",
    )
    parser.addoption(
        "--strict-draw",
        type=int,
        metavar="SEED",
        help="with --backend strict: when an operation completes is drawn from SEED, instead of as late as it may",
    )
    parser.addoption(
        "--strict-slots",
        type=int,
        metavar="N",
        help="with --backend strict: how many communicators of a rank can make progress at a time (default: all)",
    )
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="run tests marked gpu, and rank tests that name no backend, on a strict accelerator; no others run",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Has libraries compute in one thread, as ranks do, unless the environment says otherwise.

    Tensors of tests are small: more threads would only wait for each other, and burn the cores on which other workers
    test. Thread pools are sized when libraries are loaded, which a conftest may do.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers, and how property tests run: as long as it takes, and with the same examples every time.

    `--hypothesis-profile=par-storms` draws others, and more.
    """
    config.addinivalue_line(
        "markers",
        'ranks(n, timeout=300, backend="gloo", init=True, dies=(), strict=None, accelerator=None): run the test body '
        "on every one of n ranks; a list of sizes runs the test once for each",
    )
    config.addinivalue_line(
        "markers",
        'accelerator(limit=None, devices=1, segments="exact", races="error", waits="count", costs=Costs()): run the '
        'test body in a process of its own that has a device "strict", which enforces the rules of a GPU',
    )
    config.addinivalue_line("markers", "cpu(reason): a rank test of tensors on the CPU, which --accelerator leaves out")
    if config.getoption("accelerator"):
        os.environ[ENVIRONMENT] = "1"  # which modules of tests and ranks read, see `accelerator_type`
    load_profile()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test once for every world size in the marker's list."""
    options = _options_of(metafunc.definition)
    if options is not None and options.listed:
        metafunc.fixturenames.append(_SIZE)
        sizes = [
            pytest.param(size, marks=marks, id=f"{size}ranks")
            for size, marks in zip(options.sizes, options.marks, strict=True)
        ]
        metafunc.parametrize(_SIZE, sizes)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuses what cannot run on ranks."""
    if item.get_closest_marker("ranks") is not None and isinstance(item, TestCaseFunction):
        raise pytest.UsageError(f"{item.nodeid}: unittest runs its methods itself; write a rank test as a function")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Searches for no garbage while modules are imported, nor later among what they hold: a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On strict ranks and devices, only tests run that they change, such as rank tests that name no backend."""
    if config.getoption("accelerator"):
        ours = [item for item in items if _asks_for_any_device(item)]
    elif config.getoption("backend") == "strict":
        ours = [item for item in items if _asks_for_any_backend(item)]
    else:
        return
    kept = set(ours)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = ours


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls the body of a rank test: not here, but on its ranks."""
    __tracebackhide__ = True
    options = _options_of(pyfuncitem)
    if options is None:
        return None
    from .ranks.run import run_on_ranks  # noqa: PLC0415  # imports torch

    size = pyfuncitem.callspec.params[_SIZE] if options.listed else options.sizes[0]
    run_on_ranks(pyfuncitem, options, cast("int", size), _context_of(pyfuncitem.session))
    return True


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "WarmPython":
    """Starts commands of Python as forks of a process that has imported torch: see `WarmPython.start`."""
    from .commands.warm import WarmPython  # noqa: PLC0415  # imports torch

    return WarmPython(_context_of(request.session), tmp_path_factory.mktemp("commands"))


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at, below those that a kernel gives to whoever connects to somebody else."""
    ports = range(10_000, 32_768)
    for port in random.SystemRandom().sample(ports, len(ports)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise AssertionError(f"every port of {ports} is in use")


def _options_of(item: pytest.Item) -> RanksOptions | None:
    mark, device = item.get_closest_marker("ranks"), item.get_closest_marker("accelerator")
    everywhere = item.config.getoption("accelerator") and _asks_for_any_device(item)
    accelerator = Accelerator(**device.kwargs) if device is not None else Accelerator() if everywhere else None
    if mark is None:
        if accelerator is None:
            return None
        # A rank of its own that nobody meets: its process ends with the device, and nothing of it is left for others.
        return ranks(1, backend="strict", init=False, accelerator=accelerator)
    options = ranks(*mark.args, **mark.kwargs)
    if accelerator is not None:
        # A test of a GPU names its device; others are to run on this one as they are.
        by_default = device is None and item.get_closest_marker("gpu") is None
        options = replace(options, accelerator=accelerator, by_default=by_default)
    strict = item.config.getoption("backend") == "strict" or everywhere
    if not strict or not _asks_for_any_backend(item):
        return options
    draw, slots = item.config.getoption("strict_draw"), item.config.getoption("strict_slots")
    rules = Strict(slots=slots) if draw is None else Strict(complete="drawn", draw=draw, slots=slots)
    return replace(options, backend="strict", strict=rules)


def _asks_for_any_device(item: pytest.Item) -> bool:
    """Whether it runs on a GPU, or is a rank test with a process group, whatever its backend and device."""
    if item.get_closest_marker("cpu") is not None:
        return False
    return item.get_closest_marker("gpu") is not None or _asks_for_any_backend(item)


def _asks_for_any_backend(item: pytest.Item) -> bool:
    """Whether it is a rank test with a process group, whatever its backend."""
    mark = item.get_closest_marker("ranks")
    return mark is not None and "backend" not in mark.kwargs and mark.kwargs.get("init", True)


def _context_of(session: pytest.Session) -> "ForkServerContext":
    """The forkserver of this session, started at the first rank test."""
    if _CONTEXT not in session.stash:
        from .ranks.body import module_of  # noqa: PLC0415
        from .ranks.forkserver import file_of, start_forkserver  # noqa: PLC0415

        items = [item for item in session.items if isinstance(item, pytest.Function) and _options_of(item)]
        modules = {item.path: module_of(item) for item in items}
        preload = session.config.getini("ranks_preload")
        worker = getattr(session.config, "workerinput", None)  # of pytest-xdist
        run = None if worker is None else worker["testrunuid"]
        if run is not None:
            session.config.add_cleanup(lambda: file_of(run).unlink(missing_ok=True))
        session.stash[_CONTEXT] = start_forkserver(preload, [*modules.values()], run)
    return session.stash[_CONTEXT]
