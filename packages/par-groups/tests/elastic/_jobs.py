"""Jobs under keepers: each rank writes what it sees as lines of JSON."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from par_groups import Members

members = Members()

def tell(**what):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(dict(number=members.number, time=time.time(), pid=os.getpid(), **what)) + "\\n")

def steps(count, at=lambda step: None, pause=0.02):
    "Sum ones on all members, again after each loss; the last epoch has made all steps."
    while (environment := members.form(timeout=30)) is not None:
        tell(epoch=members.epoch, ranks=members.ranks, place=members.place)
        try:
            for step in range(count):
                at(step)
                ones = torch.ones(10)
                dist.all_reduce(ones)
                assert ones.unique().tolist() == [len(members.ranks)]
                members.report()
                time.sleep(pause)
            tell(ended=members.epoch)
            return
        except RuntimeError as error:
            tell(left=members.epoch)
    tell(over=True)
"""
"""The beginning of each job."""

END = "\nos._exit(0)  # the interpreter takes seconds to end on a busy machine\n"


class Job:
    """A script under one keeper for each host.

    Args:
        folder: A folder for the script and the lines of its ranks.
        script: What a rank does, after `START`.
        hosts: Number of hosts, each with a keeper.
        inside: The command in front of each host's keeper, such as one that enters a network namespace.
        address: The address of the first host.
        options: Options of the keepers.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *options: str,
        hosts: int = 1,
        inside: Callable[[int], list[str]] = lambda _: [],
        address: str = "127.0.0.1",
    ) -> None:
        self._lines = folder / "told"
        (folder / "job.py").write_text(START + script + END)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        variables = {**os.environ, "TOLD": str(self._lines), "OMP_NUM_THREADS": "1"}
        variables = {name: value for name, value in variables.items() if name not in ("RANK", "WORLD_SIZE")}
        keep = [sys.executable, "-m", "par_groups.elastic", *options, "--", sys.executable, str(folder / "job.py")]
        self.keepers = []
        for host in range(hosts):
            place = {"RANK": str(host), "WORLD_SIZE": str(hosts), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
            extra = place if hosts > 1 else {}
            self.keepers.append(
                subprocess.Popen([*inside(host), *keep], env={**variables, **extra}, stderr=subprocess.PIPE, text=True)
            )

    @property
    def told(self) -> list[dict[str, Any]]:
        """What the ranks have written so far."""
        return [json.loads(line) for line in self._lines.read_text().splitlines()] if self._lines.exists() else []

    def wait_for(self, found: Callable[[list[dict[str, Any]]], object], timeout: float = 60) -> Any:
        """Wait until what the ranks have written fulfils a condition, and return its value."""
        deadline = time.monotonic() + timeout
        while not (value := found(self.told)):
            assert time.monotonic() < deadline, self.told
            time.sleep(0.02)
        return value

    def pid_of(self, number: int) -> int:
        """Wait until a rank has written, and return its process id."""
        return int(self.wait_for(lambda told: [each["pid"] for each in told if each["number"] == number])[0])

    def end(self, timeout: float = 90) -> list[int]:
        """Wait for the keepers and return their exit codes; all processes of the job are gone then."""
        try:
            self.errors = [each.communicate(timeout=timeout)[1] for each in self.keepers]
        finally:
            for each in self.keepers:
                each.kill()
        return [each.returncode for each in self.keepers]


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return True
    return state in "ZX"


def becomes_gone(pid: int, timeout: float = 20) -> bool:
    """Return whether a process ends within some seconds."""
    deadline = time.monotonic() + timeout
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
