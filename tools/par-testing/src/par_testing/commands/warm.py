"""The test's end of a command: start it, send it signals, wait for its end."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from .process import Command, live


class WarmPython:
    """Starts `python` with some words, as `subprocess.Popen` would, but forked from a process that has imported torch.

    What a new process has to do by itself is not tested this way: what is imported and when, flags of Python, what
    becomes of closed streams and inherited signals, the end of the interpreter. A test of these starts a new Python.

    Args:
        context: The context of the forkserver.
        output: A folder for what the commands print.
    """

    def __init__(self, context: ForkServerContext, output: Path) -> None:
        self._context, self._output = context, output
        self._count = 0

    def start(
        self, words: Sequence[str], *, folder: Path, environment: Mapping[str, str], first: str = "", ranks: int = 0
    ) -> "WarmProcess":
        """Starts a command.

        Args:
            words: What follows `python` on the command line: `-m`, a module and its arguments, or a script and its own.
            folder: The folder that it runs in.
            environment: All environment variables.
            first: Source that runs before, such as faults that a test injects.
            ranks: How many ranks torch's elastic launcher may fork in this process; it starts others as ever.
        """
        self._count += 1
        output = self._output / str(self._count)
        output.mkdir()
        command = Command(
            words=tuple(words),
            folder=folder,
            environment=dict(environment),
            output=output,
            first=first,
            ranks=ranks,
        )
        return WarmProcess(self._context, command)


class WarmProcess:
    """A running command, with those methods of `subprocess.Popen` that tests need."""

    def __init__(self, context: ForkServerContext, command: Command) -> None:
        self.args, self._output = command.words, command.output
        self._process = context.Process(target=live, args=(command,), daemon=True)
        self._process.start()
        if self._process.pid is None:
            raise RuntimeError(f"the process of {command.words} did not start")
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative after a signal; None while the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended."""
        self._process.kill()

    def wait(self, timeout: float) -> int:
        """Waits for the end, and gives the exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits for the end, and gives what was written to stdout and to stderr, by its ranks too."""
        self.wait(timeout)
        return (self._output / "out").read_text(), (self._output / "err").read_text()
