"""What the forked process does: it takes on what a new Python would get, and runs a module or a script."""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from .spares import Spares


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of Python, and where it runs; see `WarmPython.start`.

    Args:
        output: The folder of the files `out` and `err`, which are its streams.
    """

    words: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    output: Path
    first: str
    ranks: int


def live(command: Command) -> None:
    """Runs the command as the main module of this forked process."""
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(command.output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(command.folder)
    set_environment(command.environment)
    exec(compile(command.first, "<first>", "exec"), {})  # noqa: S102 - the test's own
    vars(subprocess_handler)["Popen"] = Spares(command.ranks, run).start
    vars(dynamic_rendezvous)["get_method_name"] = _name_of_caller
    run(command.words, command.environment)


def run(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs what `python` with these words would; flags before the module or script are left out."""
    set_environment(environment)
    while words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.modules.pop(words[1], None)  # runpy warns of a module that is imported already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _name_of_caller(depth: int = 2) -> str:
    """What torch's rendezvous finds for each of its events by `inspect.stack`.

    That looks at every imported module. Here there are thousands, and it took a third of a command's time.
    """
    return sys._getframe(depth).f_code.co_name


def set_environment(environment: Mapping[str, str]) -> None:
    """Makes these all the environment variables of this process."""
    os.environ.clear()
    os.environ.update(environment)
