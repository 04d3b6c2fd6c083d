"""The job files of the documentation are those that `par-train render` writes."""

import re
import shlex
from pathlib import Path

from par_train.command.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "clusters" / "slurm.md"


def test_the_documented_job_is_what_its_first_lines_say_that_it_is(tmp_path, monkeypatch):
    """A shell that says nothing of the network; `nox -s hosts` gives this file to a SLURM."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    files = dict(re.findall(r'```\w+ title="(job.toml|train.sbatch)"\n(.*?)```', PAGE.read_text(), re.DOTALL))
    (tmp_path / "job.toml").write_text(files["job.toml"])
    command = re.search(r"^#   par-train (.*)$", files["train.sbatch"], re.MULTILINE)[1]
    assert main(shlex.split(command)) == 0
    assert (tmp_path / "train.sbatch").read_text() == files["train.sbatch"]
