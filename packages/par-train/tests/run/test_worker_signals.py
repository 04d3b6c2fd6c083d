"""A signal to all processes of a job, as torchrun, `timeout` and scancel send it, where the data loader has workers."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from par_testing import storm

LOOP = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy

if __name__ == "__main__":
    folder, method, own = sys.argv[1], sys.argv[2], sys.argv[3] == "own"
    with Strategy() as strategy:
        model = torch.nn.Linear(8, 1)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), 1e-3))
        data = TensorDataset(torch.ones(4096, 8))
        loader = DataLoader(data, 8, num_workers=2, multiprocessing_context=method, persistent_workers=True)
        batches = loader if own else strategy.initialize(loader)
        quiet = {"logging": LoggingPolicy(progress=False), "monitoring": MonitoringPolicy(diagnose=None)}
        with Run(folder, strategy, **quiet) as run:
            for (x,) in run.steps(batches, until=10**9):
                strategy.backward(model(x).mean(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.01)
                if run.step == 2:
                    print("READY", flush=True)
    kept = iter(batches)  # a program that ends while workers wait ends them
    next(kept)
    sys.exit(run.exit_code)
"""


@pytest.mark.parametrize(
    ("number", "method", "own"),
    [
        (signal.SIGTERM, "fork", "ours"),
        storm(signal.SIGTERM, "fork", "own"),
        storm(signal.SIGTERM, "forkserver", "ours"),
        storm(signal.SIGUSR1, "spawn", "ours"),
        storm(signal.SIGINT, "fork", "ours"),
    ],
)
def test_signal_to_the_process_group_saves_with_workers(tmp_path, number, method, own):
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    if own == "ours":  # closed with its strategy
        script.write_text(
            script.read_text().replace("    kept = iter(batches)", "    sys.exit(run.exit_code)\n    kept = 0")
        )
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "run", method, own],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = []
        while (line := process.stdout.readline()) != "READY\n":
            said.append(line)
            assert line, said  # the program has ended
        time.sleep(0.3)
        os.killpg(process.pid, number)
        rest, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if number == signal.SIGINT else 0), [*said, rest]
    assert f"{number.name}: saved after step" in rest
    assert "Traceback" not in rest
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
