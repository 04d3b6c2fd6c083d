"""Which modules a call passes through: what a reader has to open to follow it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def modules_called(*packages: str) -> Iterator[list[str]]:
    """Records the modules of packages whose functions are called meanwhile, in this thread and in those it starts.

    Importing a module is no call of it, nor is the `__init__` that a dataclass gets: these say nothing of the way.

    Args:
        packages: Names of packages to look at, such as `par_checkpoint`; their sub-packages count too.

    Yields:
        A list that is filled when the context ends: dotted names of modules, those of this thread in the order of their
        first call, then by name those that only threads called.
    """
    names: list[str] = []
    here: list[str] = []
    elsewhere: set[str] = set()
    main = threading.get_ident()

    def record(frame: FrameType, event: str, argument: object) -> None:
        del argument
        name = frame.f_globals.get("__name__", "")
        if event != "call" or name.partition(".")[0] not in packages:
            return
        if frame.f_code.co_name == "<module>" or frame.f_code.co_filename.startswith("<"):
            return
        if threading.get_ident() != main:
            elsewhere.add(name)
        elif name not in here:
            here.append(name)

    before = sys.getprofile()
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield names
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        names += [*here, *sorted(elsewhere.difference(here))]
