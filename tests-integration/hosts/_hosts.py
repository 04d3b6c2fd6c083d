"""Two hosts on one machine: network namespaces with names of their own, joined by a cable."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

HOSTS = ("host0", "host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT = 120  # seconds; a meeting that fails waits longer
LOSS_TOLERANCE = 1e-5  # relative; float32 sums over the same ranks in the same order, told in other places
JOB = ["run", "--data.folder=text", "--model.width=16", "--model.layers=1", "--model.heads=2", "--model.context=16"]
JOB += ["--train.batch_size=8", "--train.steps=12", "--train.warmup_steps=2", "--train.validate_every=6"]
JOB += ["--device=cpu"]

# Read by Python when it starts: with TEST_HOLD=5 a rank waits in its sixth step until it is asked to leave. Not in a
# rank that goes on: after a requeue, in the next job of an array, or after torchrun has started it again.
HOLD = """
import os, time

again = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
first = all(os.environ.get(name, "0") == "0" for name in again) and os.environ.get("SLURM_ARRAY_TASK_ID", "1") == "1"
if "TEST_HOLD" in os.environ and first and ("SLURM_STEP_ID" in os.environ or "RANK" in os.environ):
    from par_train.jobs.trainer import Trainer
    from par_train.run.stop import Stop

    advance, ask, asked = Trainer.advance, Stop.ask, []

    def note_and_ask(stop, number):
        asked.append(number)
        ask(stop, number)

    def held(trainer, batch):
        while trainer.step >= int(os.environ["TEST_HOLD"]) and not asked:
            time.sleep(0.01)
        return advance(trainer, batch)

    Stop.ask, Trainer.advance = note_and_ask, held
"""


def run(*command, check=True):
    """A command of the machine's own, whose words are shown if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done


def can_make_namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = run("ip", "netns", "add", "par-probe", check=False).returncode == 0
    return made and run("ip", "netns", "del", "par-probe", check=False).returncode == 0


class Hosts:
    """Two hosts that share a file system.

    Args:
        folder: Where they keep what they share.
    """

    def __init__(self, folder):
        self.folder = folder
        names = [f"{address} {name}" for address, name in zip(ADDRESSES, HOSTS, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (folder / "first").mkdir()
        (folder / "first" / "sitecustomize.py").write_text(HOLD)

    def start(self, host, *command, **variables):
        """Starts a command on one of them."""
        words = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {HOSTS[host]}; exec {shlex.join(command)}"
        # Not `ip netns exec`, which hides control groups from slurmd.
        inside = ["nsenter", f"--net=/run/netns/par{host}", "unshare", "--uts", "--mount", "sh", "-c", words]
        path = f"{self.folder / 'first'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}
        environment.pop("GLOO_SOCKET_IFNAME", None)  # hosts find each other by their names
        return subprocess.Popen(
            inside, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ended(self, process):
        """A command that has ended, well or not: its exit code, and what it has said."""
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def finish(self, process):
        """What a command has said, when it has ended well."""
        done = self.ended(process)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def kill(self, host):
        """Ends everything on a host at once, as a lost node does."""
        for process in run("ip", "netns", "pids", f"par{host}").stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def wait_for_steps(self, folder, count):
        """Waits until a run has taken so many steps."""
        metrics, deadline = self.folder / folder / "metrics.jsonl", time.monotonic() + TIMEOUT
        while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
            assert time.monotonic() < deadline, f"{metrics} did not reach {count} steps"
            time.sleep(0.05)


@contextmanager
def two_hosts(folder):
    if not can_make_namespaces():
        pytest.skip("network namespaces need root, and `ip` of iproute2")
    folder.chmod(0o755)
    hosts = Hosts(folder)
    try:
        for host in range(2):
            run("ip", "netns", "add", f"par{host}")
            run("ip", "-n", f"par{host}", "link", "set", "lo", "up")
        cable = ["type", "veth", "peer", "name", "par-v1", "netns", "par1"]
        run("ip", "link", "add", "par-v0", "netns", "par0", *cable)
        for host, address in enumerate(ADDRESSES):
            run("ip", "-n", f"par{host}", "addr", "add", f"{address}/24", "dev", f"par-v{host}")
            run("ip", "-n", f"par{host}", "link", "set", f"par-v{host}", "up")
        yield hosts
    finally:
        for host in range(2):
            if Path("/run/netns", f"par{host}").exists():
                hosts.kill(host)
            run("ip", "netns", "del", f"par{host}", check=False)


def write_text(folder):
    folder.mkdir()
    for number in range(6):
        lines = [f"{word} {(number * word) % 89} {word * word}" for word in range(300)]
        (folder / f"{number}.txt").write_text("\n".join(lines))


def losses_of(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reference(folder, *words, ranks):
    """The losses of the same ranks on one host, which nobody disturbs."""
    command = [sys.executable, "-m", "par_train", *words, f"--ranks={ranks}", "--output=reference"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return losses_of(folder / "reference")
