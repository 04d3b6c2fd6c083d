"""Reading a config file: TOML, or a Python file whose names are the keys."""

import inspect
import runpy
import tomllib
import traceback
from pathlib import Path
from typing import Any

from .._errors import UserError


def read_file(path: Path) -> dict[str, Any]:
    """Return the tables of a config file.

    Args:
        path: A TOML file, or a Python file (".py"), which is run.

    Raises:
        UserError: The file does not exist, or has a mistake; the message has the line of a mistake in a Python file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the config file {path}: {error.strerror}; give the path of a TOML or Python file"
        ) from None
    if path.suffix == ".py":
        return _run_python(path)
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} is not TOML: {error}; correct it there") from None


def _run_python(path: Path) -> dict[str, Any]:
    """Return the global names of a Python file, without modules, functions, classes and names with an underscore."""
    try:
        # The file is the user's own program. It is run, not parsed, so that it may compute values.
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # the file's own mistake, whichever it is
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, what = error.lineno, error.msg
        else:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line, what = (lines[-1] if lines else 1), str(error)
        raise UserError(
            f"the config file {path}, line {line}: {type(error).__name__}: {what}; correct it there"
        ) from error
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_")
        and not (inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value))
    }
