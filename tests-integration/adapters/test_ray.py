"""Ray Train on a strategy: two workers, one of which dies, and the losses of one process."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from .alone import make_model, rows

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")
pytest.importorskip("transformers")
adapter = pytest.importorskip("par_train.adapters.ray")

STEPS = 6


@pytest.fixture
def cluster():
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets want short paths
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


def make_loop(marker):
    """A train loop, as a closure: workers do not find the modules of tests."""
    model, data = make_model(), [row["input_ids"] for row in rows()]

    def loop(strategy, config):
        parts = strategy.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        rank, ranks = strategy.groups.rank("data"), strategy.groups.size("data")
        for step in range(adapter.resume(strategy) or 0, STEPS):
            if step == 3 and torch.distributed.get_rank() == 1 and not marker.exists():
                marker.touch()
                os._exit(1)
            batch = torch.stack(data[4 * step : 4 * step + 4]).chunk(ranks)[rank]
            loss = parts[0](input_ids=batch, labels=batch).loss
            strategy.backward(loss, parts[1])
            parts[1].step()
            parts[1].zero_grad()
            mean = loss.detach() / ranks
            torch.distributed.all_reduce(mean, group=strategy.groups["data"])
            adapter.report(strategy, {"loss": mean.item(), "step": step}, step=step + 1)

    return loop


def expected():
    model, data = make_model(), [row["input_ids"] for row in rows()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = torch.stack(data[4 * step : 4 * step + 4])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.filterwarnings("ignore")  # of Ray's own processes and sockets
@pytest.mark.usefixtures("cluster")
def test_lost_worker_is_replaced_and_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = ray.train.torch.TorchTrainer(
        adapter.with_strategy(make_loop(Path(tmp_path / "died")), zero=3),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            failure_config=ray.train.FailureConfig(max_failures=1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert (tmp_path / "died").exists()
    assert result.metrics["step"] == STEPS - 1
    assert result.metrics["loss"] == pytest.approx(expected(), rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        f"checkpoint-{step:08d}" for step in (STEPS - 1, STEPS)
    ]
