"""Open MPI: the program of the documentation as it is, under mpirun."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts

PAGE = (Path(__file__).parents[2] / "docs" / "clusters" / "mpi.md").read_text()
LOSS_TOLERANCE = 1e-5  # relative; means over two halves of a batch, and their mean


@pytest.fixture
def mpirun():
    found = shutil.which("mpirun")
    if found is None:
        pytest.skip("mpirun is missing; install openmpi-bin")
    # On one machine, as root: no ssh, no other network than the loopback.
    return [
        found,
        "--allow-run-as-root",
        "--oversubscribe",
        "--mca",
        "btl",
        "self,tcp",
        "--mca",
        "oob_tcp_if_include",
        "lo",
    ]


def run(folder, *command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def losses_of(folder):
    lines = (folder / "runs" / "linear" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_documented_program_trains_under_mpirun_as_one_process_does(mpirun, tmp_path):
    code = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)[1]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "train.py").write_text(
            code + "    environment = strategy.environment\n    print('rank', environment.rank, environment.launcher)\n"
        )
    one = run(folders[0], sys.executable, "train.py")
    two = run(folders[1], *mpirun, "-n", "2", sys.executable, "train.py")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert sorted(two.stdout.splitlines())[-2:] == ["rank 0 openmpi", "rank 1 openmpi"]
    assert len(losses_of(folders[0])) == 4  # each of ten steps
    assert losses_of(folders[1]) == pytest.approx(losses_of(folders[0]), rel=LOSS_TOLERANCE)


def test_variables_that_deny_what_mpirun_says_are_one_line(mpirun, tmp_path):
    train = [sys.executable, "-m", "par_train", "run", "--device=cpu", "--train.steps=2"]
    done = run(tmp_path, *mpirun, "-n", "2", *train, RANK="0", WORLD_SIZE="2")
    lines = [line for line in done.stderr.splitlines() if line.startswith("par-train: ")]
    assert lines == [line for line in lines if "RANK is 0, but mpirun has started this process as rank 1 of 2" in line]
    assert len(lines) == 1, done.stderr
    assert not (tmp_path / "runs").exists()
