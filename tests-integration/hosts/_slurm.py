"""A SLURM of two hosts: slurmctld, a slurmd on each, and munge."""

import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ._hosts import HOSTS, run

CONFIG = """\
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
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
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
        if started:  # and wait for its end: the next cluster would take it for one that runs
            end(Path("/run/munge/munged.pid").read_text().strip())
