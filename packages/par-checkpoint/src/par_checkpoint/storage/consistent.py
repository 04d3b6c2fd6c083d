"""Consistent reads of a checkpoint that a save may replace: a reader gets either the old or the new one completely.

Readers take no locks. They record the version of the checkpoint, read it, and compare the version again; if it has
changed, they read again. Some network file systems show changes by other machines late, including names and sizes. A
reader there may mix both versions without noticing. On these file systems, a read that fails is repeated after a pause.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from .._errors import CheckpointError, ReplacedError
from .folder import Folder

Value = TypeVar("Value")

_TRIES = 5  # each reads all of it: who replaces a checkpoint faster than it is read must learn of it

_UNDEFINED = "What was being loaded is now undefined"


def read_consistently(
    folder: Folder, read: Callable[[], Value], *, checked: Callable[[Value], bool] = lambda _: False
) -> Value:
    """Read a checkpoint; if it is replaced in between, read the new one from the beginning, a few times.

    Args:
        folder: The checkpoint's folder.
        read: Reads it, from the beginning, and gives the result.
        checked: Whether a result can only come from one checkpoint, as all of it was compared with checksums.

    Raises:
        ReplacedError: It was replaced every time.
    """
    before = version_of(folder)
    return retry_while_replaced(lambda: version_of(folder), read, before, folder.url, checked, lambda: folder.settles)


def retry_while_replaced(
    version: Callable[[], str | None],
    read: Callable[[], Value],
    before: str | None,
    url: str,
    checked: Callable[[Value], bool],
    settles: Callable[[], float],
) -> Value:
    """Read a checkpoint on one rank or on several, which then all see the same version and the same error or none.

    Args:
        version: Gives the version that is there now, see `version_of`; the same on every rank.
        read: Reads it, from the beginning, and gives the result.
        before: The version that was there before.
        url: The folder, for messages.
        checked: Whether a result can only come from one checkpoint.
        settles: Gives what `Folder.settles` is, where a read has failed; the same on every rank.

    Raises:
        ReplacedError: It was replaced every time.
    """
    was_replaced, may_be_late = False, True
    for _ in range(_TRIES):
        failed: CheckpointError | FileNotFoundError | None = None
        try:
            value = read()
        except (CheckpointError, FileNotFoundError) as error:
            failed = error
        # All bytes fit the checksums of one manifest, so they are of one checkpoint.
        if failed is None and checked(value):
            return value
        after = version()
        if after != before:
            before, was_replaced = after, True
        elif failed is None:
            return value
        # A stale cache may be the cause, so the read is repeated once after a pause.
        elif may_be_late and (seconds := settles()):
            may_be_late = False
            time.sleep(seconds)
        elif not was_replaced:
            raise failed
        else:
            raise ReplacedError(f"{url!r} was replaced while it was read. {_UNDEFINED}. Now: {failed}") from failed
    raise ReplacedError(
        f"{url!r} was replaced while it was read, {_TRIES} times one after the other; read it when it rests, or save "
        f"every one to a path of its own. {_UNDEFINED}"
    )


def version_of(folder: Folder) -> str | None:
    """Return a text that differs between the current checkpoint and any later one.

    None without a checkpoint of ours.
    """
    folder.recover()
    return folder.version()
