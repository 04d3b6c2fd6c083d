"""Two hosts on one machine: network namespaces with names of their own, joined by a cable.

Needs root, and for SLURM Debian's slurm-wlm and munge. `nox -s hosts` runs it; it is skipped where that is missing.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts

HOSTS = ("host0", "host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TIMEOUT = 120  # seconds; a meeting that fails waits longer
LOSS_TOLERANCE = 1e-5  # relative; float32 sums over the same ranks in the same order, told in other places
JOB = ["run", "--data.folder=text", "--model.width=16", "--model.layers=1", "--model.heads=2", "--model.context=16"]
JOB += [
    "--train.batch_size=8",
    "--train.steps=12",
    "--train.warmup_steps=2",
    "--train.validate_every=6",
    "--device=cpu",
]
SLURM = """\
ClusterName=par
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName=host[0-1] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
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

    def start(self, host, *command, **variables):
        """Starts a command on one of them."""
        words = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {HOSTS[host]}; exec {shlex.join(command)}"
        # Not `ip netns exec`, which hides control groups from slurmd.
        inside = ["nsenter", f"--net=/run/netns/par{host}", "unshare", "--uts", "--mount", "sh", "-c", words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        environment.pop("GLOO_SOCKET_IFNAME", None)  # hosts find each other by their names
        return subprocess.Popen(
            inside, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, process):
        """What a command has said, when it has ended well."""
        try:
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
        assert process.returncode == 0, f"{out}\n{err}"
        return out


@pytest.fixture
def hosts(tmp_path):
    if not can_make_namespaces():
        pytest.skip("network namespaces need root, and `ip` of iproute2")
    tmp_path.chmod(0o755)
    try:
        for host in range(2):
            run("ip", "netns", "add", f"par{host}")
            run("ip", "-n", f"par{host}", "link", "set", "lo", "up")
        cable = ["type", "veth", "peer", "name", "par-v1", "netns", "par1"]
        run("ip", "link", "add", "par-v0", "netns", "par0", *cable)
        for host, address in enumerate(ADDRESSES):
            run("ip", "-n", f"par{host}", "addr", "add", f"{address}/24", "dev", f"par-v{host}")
            run("ip", "-n", f"par{host}", "link", "set", f"par-v{host}", "up")
        yield Hosts(tmp_path)
    finally:
        for host in range(2):
            run("ip", "netns", "del", f"par{host}", check=False)


def write_text(folder):
    folder.mkdir()
    for number in range(6):
        lines = [f"{word} {(number * word) % 89} {word * word}" for word in range(300)]
        (folder / f"{number}.txt").write_text("\n".join(lines))


def losses_of(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def reference(folder):
    """The losses of the same four ranks on one host."""
    command = [sys.executable, "-m", "par_train", *JOB, "--ranks=4", "--output=reference"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return losses_of(folder / "reference")


def test_torchrun_over_two_hosts_trains_as_one_host_does(hosts):
    """Replicas across the hosts, tensor ranks inside of them; one host saves, and both have the checkpoint."""
    write_text(hosts.folder / "text")
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-id=par", "--rdzv-endpoint=host0:29511", "-m", "par_train"]
    started = [hosts.start(host, sys.executable, *torchrun, *JOB, "--output=two") for host in range(2)]
    for process in started:
        hosts.finish(process)
    assert losses_of(hosts.folder / "two") == pytest.approx(reference(hosts.folder), rel=LOSS_TOLERANCE)
    assert (hosts.folder / "two" / "checkpoint" / "model.safetensors").exists()


def end(process):
    """Ends a daemon, and waits until it is gone."""
    run("kill", process, check=False)
    deadline = time.monotonic() + 10
    while Path("/proc", process).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run("kill", "-9", process, check=False)


@contextmanager
def slurm(hosts):
    """A cluster of both, ended at the end."""
    for name in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is missing; install slurm-wlm and munge")
    started = run("pgrep", "-x", "munged", check=False).returncode != 0
    if started:
        run("install", "-d", "-o", "munge", "-g", "munge", "/run/munge")
        run("setpriv", "--reuid=munge", "--regid=munge", "--init-groups", shutil.which("munged"))
    folder = hosts.folder / "slurm"
    for part in ("state", "spool/host0", "spool/host1"):
        (folder / part).mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder))
    configured = {"SLURM_CONF": str(folder / "slurm.conf")}
    try:
        hosts.finish(hosts.start(0, "slurmctld", **configured))
        for host, name in enumerate(HOSTS):
            hosts.finish(hosts.start(host, "slurmd", "-N", name, **configured))
        deadline = time.monotonic() + 30
        while "idle 2" not in hosts.finish(hosts.start(0, "sinfo", "-h", "-o", "%t %D", **configured)):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.3)
        yield configured
    finally:
        for path in folder.glob("*.pid"):
            end(path.read_text().strip())
        if started:
            run("pkill", "-x", "munged", check=False)


def test_slurm_over_two_hosts_trains_as_one_host_does(hosts):
    """The command as it is, under srun: no torchrun, no address."""
    write_text(hosts.folder / "text")
    with slurm(hosts) as configured:
        srun = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, "-m", "par_train", *JOB, "--output=cluster"]
        hosts.finish(hosts.start(0, *srun, **configured))
    assert losses_of(hosts.folder / "cluster") == pytest.approx(reference(hosts.folder), rel=LOSS_TOLERANCE)
