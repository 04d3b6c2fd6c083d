"""A real SLURM: tasks of srun, the file of the documentation as it is, an array, and variables that contradict."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from ._hosts import JOB, LOSS_TOLERANCE, losses_of, reference, run, write_text
from ._slurm import slurm

pytestmark = pytest.mark.hosts

PAGE = (Path(__file__).parents[2] / "docs" / "clusters" / "slurm.md").read_text()


def documented(title):
    """A file of the documentation, by its title."""
    return re.search(rf'```\w+ title="{title}"\n(.*?)```', PAGE, re.DOTALL)[1]


def wait_until(told, what):
    deadline = time.monotonic() + 200
    while not told():
        assert time.monotonic() < deadline, f"{what}: not within 200 s"
        time.sleep(0.5)


def test_slurm_over_two_hosts_trains_as_one_host_does(hosts):
    """The command as it is, under srun: no torchrun, no address."""
    write_text(hosts.folder / "text")
    with slurm(hosts) as configured:
        srun = ["srun", "-N2", "--ntasks-per-node=2", sys.executable, "-m", "par_train", *JOB, "--output=cluster"]
        hosts.finish(hosts.start(0, *srun, **configured))
    expected = reference(hosts.folder, *JOB, ranks=4)
    assert losses_of(hosts.folder / "cluster") == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_the_documented_job_saves_before_its_time_is_up_is_requeued_and_goes_on(hosts):
    """SLURM's own clock sends the signal; only then the job's sixth step ends."""
    for name in ("job.toml", "train.sbatch"):
        (hosts.folder / name).write_text(documented(name))
    with slurm(hosts) as configured:

        def ask(*words):
            return hosts.finish(hosts.start(0, *words, **configured))

        ask("env", "TEST_HOLD=5", "sbatch", "--time=3", "--signal=B:USR1@70", "train.sbatch")
        wait_until(lambda: "PENDING BeginTime" in ask("squeue", "-h", "-o", "%T %r"), "the requeue")
        saved = losses_of(hosts.folder / "runs" / "notes")
        assert 5 <= len(saved) < 60
        ask("scontrol", "update", "JobId=1", "StartTime=now")  # SLURM would wait for two minutes
        wait_until(lambda: not ask("squeue", "-h"), "the end of the job")
        job = ask("scontrol", "show", "job", "1")
    log = (hosts.folder / "notes-1.log").read_text()
    assert "Restarts=1" in job, log
    assert "JobState=COMPLETED" in job, log
    losses = losses_of(hosts.folder / "runs" / "notes")
    expected = reference(hosts.folder, "run", "job.toml", ranks=2)
    assert losses[: len(saved)] == saved
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_of_an_array_each_job_goes_on_where_the_last_has_left(hosts):
    (hosts.folder / "job.toml").write_text(documented("job.toml"))
    render = [sys.executable, "-m", "par_train", "render", "slurm", "job.toml", "--world=2", "--devices-per-node=1"]
    with slurm(hosts) as configured:
        hosts.finish(hosts.start(0, *render, "--cores=1", "--resumes=3", "--file=array.sbatch"))
        held = hosts.start(0, "sbatch", "--time=5", "--signal=USR1@60", "array.sbatch", TEST_HOLD="5", **configured)
        hosts.finish(held)
        hosts.wait_for_steps("runs/notes", 5)
        running = hosts.finish(hosts.start(0, "squeue", "-h", "-t", "R", "-o", "%A", **configured)).strip()
        told = hosts.ended(hosts.start(0, "scancel", "--verbose", "--signal=USR1", running, **configured))
        assert "Signal" in told.stderr, told
        wait_until(lambda: not hosts.finish(hosts.start(0, "squeue", "-h", **configured)), "the end of the array")
    logs = [(hosts.folder / f"notes-1_{job}.log").read_text() for job in (1, 2, 3)]
    assert "saved" in logs[0], logs[0]
    assert "60/60" in logs[1], logs[1]
    assert "60/60" not in logs[2], logs[2]
    expected = reference(hosts.folder, "run", "job.toml", ranks=2)
    assert losses_of(hosts.folder / "runs" / "notes") == pytest.approx(expected, rel=LOSS_TOLERANCE)


def test_variables_that_are_not_whole_or_contradict_are_one_line_and_end_all_ranks(hosts):
    write_text(hosts.folder / "text")
    train = [sys.executable, "-m", "par_train", *JOB, "--output=refused"]
    refused = {
        "env -u SLURM_LOCALID": "the variable SLURM_LOCALID is missing, which srun needs",
        "env -u SLURM_PROCID": "the variable SLURM_PROCID is missing, which srun needs",
        "env RANK=0 WORLD_SIZE=4": "RANK is 0, but srun has started this process as rank 1 of 4: two launchers",
        "env WORLD_SIZE=2": "WORLD_SIZE is 2, but srun has started this process as rank 0 of 4: two launchers",
    }
    with slurm(hosts) as configured:
        for changed, message in refused.items():
            srun = ["srun", "-N2", "--ntasks-per-node=2", *shlex.split(changed), *train]
            done = hosts.ended(hosts.start(0, *srun, **configured))
            lines = [line for line in done.stderr.splitlines() if line.startswith("par-train: ")]
            assert done.returncode == 2, done.stderr
            assert all(message in line for line in lines), done.stderr
            # Who does not know its rank speaks; else rank 0 does, for all.
            assert len(lines) == (4 if changed.startswith("env -u") else 1), done.stderr
            assert "Traceback" not in done.stderr
        assert not (hosts.folder / "refused").exists()
        # No rank is left behind, waiting for the others.
        assert "par_train" not in run("ps", "-eo", "args").stdout.replace("render", "")
