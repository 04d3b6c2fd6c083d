"""Reading a checkpoint that a save may replace meanwhile: wholly the old or wholly the new one."""

from collections.abc import Callable
from typing import TypeVar

from .._errors import CheckpointError, ReplacedError
from .storage import Folder

Value = TypeVar("Value")

_TRIES = 5  # each reads all of it: who replaces a checkpoint faster than it is read has to be told

_UNDEFINED = "What was being loaded is now undefined"


def version_of(folder: Folder) -> str | None:
    """What tells the checkpoint that is in a folder now from the next; None if nothing of ours is."""
    folder.recover()
    return folder.version()


def unmixed(folder: Folder, act: Callable[[], Value], *, checked: Callable[[Value], bool] = lambda _: False) -> Value:
    """The result of reading a checkpoint; if it was replaced in between, of reading it again, a few times.

    Args:
        folder: The checkpoint's.
        act: Reads, from the beginning.
        checked: Whether a result can only come from one checkpoint, as all of it was compared with checksums.

    Raises:
        ReplacedError: It was replaced every time.
    """
    return unmixed_by(lambda: version_of(folder), act, version_of(folder), folder.url, checked)


def unmixed_by(
    version: Callable[[], str | None],
    act: Callable[[], Value],
    before: str | None,
    url: str,
    checked: Callable[[Value], bool],
) -> Value:
    """The same on several ranks, all of which have the same version, and the same error or none.

    Args:
        version: As of now.
        act: Reads.
        before: The version as of before.
        url: For messages.
        checked: Whether a result is of one checkpoint.
    """
    for number in range(_TRIES):
        failed: CheckpointError | FileNotFoundError | None = None
        try:
            value = act()
        except (CheckpointError, FileNotFoundError) as error:
            failed = error
        if failed is None and checked(value):
            return value
        after = version()
        if after != before:
            before = after
        elif failed is None:
            return value
        elif number == 0:
            raise failed
        else:
            raise ReplacedError(f"{url!r} was replaced while it was read. {_UNDEFINED}. Now: {failed}") from failed
    raise ReplacedError(
        f"{url!r} was replaced while it was read, {_TRIES} times one after the other; read it when it rests, or save "
        f"each to a path of its own. {_UNDEFINED}"
    )
