"""The errors that are printed as one line without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake in an argument of the caller: exit code 2.

    The message has the value, the rule and a fix.
    """


class TrainingError(RuntimeError):
    """Training has begun, and cannot continue: exit code 1. All ranks raise it identically."""


@contextmanager
def as_user_error(prefix: str = "", *others: type[Exception]) -> Iterator[None]:
    """Raise a ValueError of another package as a `UserError`, for calls whose arguments are the user's.

    Args:
        prefix: Text in front of the message.
        *others: Further kinds of errors that are the user's mistake in this call.
    """
    mistakes: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except mistakes as error:
        raise UserError(f"{prefix}{error}") from error
