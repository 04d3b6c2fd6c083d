"""The examples hang as the README shows, and print the lines that it shows."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()


def plain(line):
    """Return a line without its number of seconds, which depends on the machine, and without line breaks."""
    return re.sub(r"no progress for \d+ s", "no progress", " ".join(line.split()))


@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py"])
def test_example_prints_the_line_of_the_readme(warm_python, tmp_path, example):
    code, shown = re.search(rf'title="{example}"\n(.*?)```.*?```text\n(.*?)```', README, re.DOTALL).groups()
    program = (PACKAGE / "examples" / example).read_text()
    assert program.partition('"""\n\n')[2] == code
    (tmp_path / example).write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    process = warm_python.start(torchrun, folder=tmp_path, environment=environment, ranks=4)
    wanted, lines = plain(shown), []
    reported = tmp_path / "dumps" / "diagnosis.txt"
    while wanted not in lines:  # a busy machine may report an earlier moment first
        time.sleep(0.1)
        lines = [plain(line) for line in reported.read_text().splitlines()] if reported.exists() else []
        assert process.returncode is None, process.communicate(60)
    process.send_signal(signal.SIGTERM)
    assert wanted in map(plain, process.communicate(60)[1].splitlines())
