"""The program in README: the same samples on any number of ranks, and after a resume on another number."""

import os
import re
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader

PACKAGE = Path(__file__).parents[1]
EXAMPLE, README = PACKAGE / "examples" / "plain_loop.py", (PACKAGE / "README.md").read_text()
SHOWN = re.search(r"```console\n(.*?)```", README, re.DOTALL)[1].splitlines()


def run(warm_python, folder, ranks):
    """Return the lines that the example prints on some ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(EXAMPLE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = warm_python.start(torchrun, folder=folder, environment=environment, ranks=ranks)
    printed, errors = process.communicate(120)
    assert process.returncode == 0, errors
    return printed.splitlines()


def test_readme_shows_the_code_of_the_example():
    code = EXAMPLE.read_text()
    assert code[code.index("import json") :] in README


def test_example_prints_the_shown_lines_on_2_1_and_3_ranks(warm_python, tmp_path):
    printed = [line for ranks in (2, 1, 3) for line in run(warm_python, tmp_path, ranks)]
    assert printed == [line for line in SHOWN if not line.startswith("$")]


def test_shown_samples_equal_an_uninterrupted_run_on_one_rank():
    plain = DataLoader(TensorDataset(torch.arange(100)), batch_size=6, shuffle=True)
    loader = ShardedDataLoader(plain, rank=0, num_replicas=1, seed=0)
    samples = [sample for _, (batch,) in zip(range(6), loader, strict=False) for sample in batch.tolist()]
    shown = [int(number) for line in SHOWN for number in re.findall(r"\d+", line.partition(":")[2])]
    assert samples == shown
