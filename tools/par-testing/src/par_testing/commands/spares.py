"""Ranks that torch's elastic launcher gets from a fork instead of a new Python.

They are forked before the launcher runs: a fork of a process with threads, as the launcher's is later, would inherit
locks that nobody lets go.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Run = Callable[[Sequence[str], Mapping[str, str]], None]


class Spares:
    """Processes that wait for a command line, and end with the one that made them.

    Args:
        count: How many to fork.
        run: Runs a command line, given its words after `python` and its environment variables.
    """

    def __init__(self, count: int, run: Run) -> None:
        self._waiting: list[tuple[int, Connection]] = []
        for _ in range(count):
            theirs, mine = Pipe(duplex=False)
            process = os.fork()
            if process == 0:
                for each in (mine, *(pipe for _, pipe in self._waiting)):
                    each.close()
                _wait_and_run(theirs, run)
            theirs.close()
            self._waiting.append((process, mine))

    def start(self, args: Sequence[str], env: Mapping[str, str], **options: Any) -> "Child | subprocess.Popen[bytes]":
        """Stands for `subprocess.Popen` in torch's launcher."""
        if not self._waiting:
            return subprocess.Popen(args, env=env, **options)
        process, pipe = self._waiting.pop(0)
        pipe.send((args[1:], dict(env), signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        pipe.close()
        return Child(process)


class Child:
    """A forked child, with those methods of `subprocess.Popen` that the launcher calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code


def _wait_and_run(pipe: Connection, run: Run) -> None:
    """The whole life of a spare process.

    Its short name says whose rank it becomes, for it has no command line of its own.
    """
    code = 1
    try:
        launcher = os.getppid()
        os.setsid()  # as the launcher starts its ranks
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        order = _order_of(pipe)
        if order is not None:
            words, environment, blocked = order
            Path("/proc/self/comm").write_text(f"rank of {launcher}")
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            run(words, environment)
            code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _order_of(pipe: Connection) -> tuple[Sequence[str], Mapping[str, str], set[int]] | None:
    """Words, environment variables and blocked signals of a command line; None if the launcher ends without one."""
    try:
        words, environment, blocked = pipe.recv()
    except EOFError:
        return None
    return words, environment, blocked
