"""What `@pytest.mark.ranks(...)` says, read and validated."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
from _pytest.mark.structures import ParameterSet

from .accelerator.options import Accelerator
from .strict.options import Strict


def ranks(
    n: int | Sequence[int | ParameterSet],
    timeout: float = 300.0,
    backend: str = "gloo",
    init: bool = True,
    dies: Sequence[int] = (),
    strict: Strict | None = None,
    *,
    accelerator: Accelerator | None = None,
) -> "RanksOptions":
    """The options of a marker; the parameters are those of `@pytest.mark.ranks`.

    Args:
        n: The world size; a list runs the test once for each of the sizes in it, of which one that has marks of its own
            is a `pytest.param(8, marks=...)`.
        timeout: Seconds that the test may take.
        backend: The backend of the default process group: "gloo", "fake", "strict" for ranks that enforce what NCCL
            would, or what else torch knows.
        init: Whether to initialise torch.distributed before the test body runs.
        dies: The ranks that must be ended by a signal.
        strict: What backend="strict" enforces; None for its defaults.
        accelerator: The strict device that each rank has; None for none.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of its range.
    """
    listed = not isinstance(n, int)
    items = (n,) if isinstance(n, int) else tuple(n)
    given = [each if isinstance(each, ParameterSet) else pytest.param(each) for each in items]
    sizes = tuple(cast("int", each.values[0]) for each in given)  # which are validated below
    marks = tuple(each.marks for each in given)
    options = RanksOptions(sizes, marks, listed, float(timeout), backend, bool(init), tuple(dies), strict, accelerator)
    _validate(options)
    return options


@dataclass(frozen=True)
class RanksOptions:
    """The validated options of one rank test.

    Args:
        sizes: The world sizes to run with.
        marks: The marks of each size.
        listed: Whether the sizes were given as a list, and so belong into the test's name.
        timeout: Seconds that the test may take.
        backend: The backend of the default process group.
        init: Whether to initialise torch.distributed before the test body runs.
        dies: The ranks that must be ended by a signal.
        strict: What a strict backend enforces, if not its defaults.
        accelerator: The strict device that each rank has, if any.
        by_default: Whether tensors of the test are made on it if the test names no device.
    """

    sizes: tuple[int, ...]
    marks: tuple[Collection[pytest.MarkDecorator | pytest.Mark], ...]
    listed: bool
    timeout: float
    backend: str
    init: bool
    dies: tuple[int, ...]
    strict: Strict | None
    accelerator: Accelerator | None
    by_default: bool = False


def _validate(options: RanksOptions) -> None:
    if not options.sizes:
        raise ValueError("ranks([]) runs nothing; name at least one world size")
    for size in options.sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"ranks(n) takes an integer or a list of integers, not {size!r}")
        if size < 1:
            raise ValueError(f"ranks({size}): a world has at least 1 rank")
    if options.timeout <= 0:
        raise ValueError(f"ranks(timeout={options.timeout}): seconds, more than 0")
    if not options.backend:
        raise ValueError('ranks(backend=""): name a backend such as "gloo", or use init=False for none')
    for rank in options.dies:
        if not 0 <= rank < min(options.sizes):
            raise ValueError(f"ranks(dies={options.dies}): rank {rank} is not in a world of {min(options.sizes)}")
    if options.strict is not None and options.backend != "strict":
        raise ValueError(f'ranks(backend="{options.backend}", strict={options.strict}): give backend="strict" with it')
    if options.accelerator is not None and options.backend != "strict" and options.init:
        raise ValueError(
            f'ranks(backend="{options.backend}", accelerator=...): only strict groups take tensors of a strict device; '
            'pass backend="strict"'
        )
