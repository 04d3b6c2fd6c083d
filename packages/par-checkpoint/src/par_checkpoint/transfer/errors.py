"""Errors of one rank that every rank raises."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from par_groups import error_text

from .._errors import CheckpointError

Value = TypeVar("Value")

_KINDS: tuple[type[Exception], ...] = (ValueError, TypeError, ImportError, FileExistsError, FileNotFoundError, OSError)


@dataclass(frozen=True)
class PortableError:
    """An error that every rank can raise. An exception itself may need classes that another rank cannot unpickle."""

    kind: type[Exception]
    text: str
    number: int | None

    @classmethod
    def of(cls, error: BaseException) -> "PortableError":
        """Return the error with its text, and with its type if that is a built-in one."""
        number = error.errno if isinstance(error, OSError) else None
        text = error_text(error)
        if isinstance(error, CheckpointError):
            return cls(type(error), text, number)
        kind = next((each for each in _KINDS if isinstance(error, each)), CheckpointError)
        return cls(kind, text if type(error) is kind else f"{type(error).__name__}: {text}", number)

    def error(self, prefix: str = "") -> Exception:
        """Return the error, with a prefix such as the number of its rank."""
        error = self.kind(prefix + self.text)
        if isinstance(error, OSError):
            error.errno = self.number  # callers check it, for example for ENOSPC
        return error


def attempt(act: Callable[[], Value]) -> tuple[Value | None, BaseException | None]:
    """Return the result of a call and None, or None and the error that the call raised."""
    try:
        return act(), None
    except BaseException as error:
        return None, error
