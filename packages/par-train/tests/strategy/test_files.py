"""What a strategy writes, and what it and others read."""

import shutil
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import CheckpointError, Tiers
from par_testing import storm
from par_train import Strategy

TOLERANCE = 1e-5  # relative, fp32: sums over ranks in another order


def make_model(width=17):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(15, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 7))


def loader():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 15, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :7] ** 2), batch_size=8, shuffle=True)


class Training:
    """A model in training."""

    def __init__(self, width=17, dropout=True, **options):
        self.strategy = Strategy(clip_norm=1.0, **options)
        model = make_model(width)
        model.train(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.loader, self.scheduler = self.strategy.initialize(
            model, optimizer, loader(), scheduler
        )

    def steps(self, count):
        losses = []
        for _ in range(count):
            loss = self.strategy.execute_pipeline(self.loader, self.model, functional.mse_loss, self.optimizer)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            total = loss.clone()
            dist.all_reduce(total, group=self.strategy.groups["data"])
            losses.append(total.item() / self.strategy.groups.size("data"))
        return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("plan", "zero"), [("huggingface", 3), ("torch", 0), *map(storm, ("huggingface", "torch"), (0, 3))]
)
def test_objects_come_back(plan, zero, tmp_path):
    """Also in the file that torch itself opens."""
    first, second = Training(zero=zero), Training(zero=zero)
    first.steps(2)
    ends = {"model": "model", "optimizer": "model", "scheduler": "model"}
    if plan == "torch":
        ends = {kind: f"{kind}.pt" for kind in ends}
    for kind, end in ends.items():
        first.strategy.save(getattr(first, kind), tmp_path / end, plan=plan, max_file_size_gb=1)
    for kind, end in ends.items():
        second.strategy.load(getattr(second, kind), tmp_path / end, plan=plan)
    second.loader.load_state_dict(first.loader.state_dict())
    expected = first.steps(2)
    second.strategy.steps = 2  # torch's generator is the process's
    assert second.steps(2) == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".pt") == (
        ["model.pt", "optimizer.pt", "scheduler.pt"] if plan == "torch" else []
    )
    if plan == "torch":
        whole = torch.load(tmp_path / "model.pt", weights_only=True)
        assert {name: tuple(each.shape) for name, each in whole.items()} == {
            name: tuple(each.shape) for name, each in make_model().state_dict().items()
        }


@pytest.mark.ranks(2)
def test_a_model_from_elsewhere_is_loaded_from_a_torch_file(tmp_path):
    if dist.get_rank() == 0:
        torch.save(make_model(17).state_dict(), tmp_path / "theirs.pt")
    training = Training(zero=1)
    training.steps(1)
    training.strategy.load(training.model, tmp_path / "theirs.pt", plan="torch")
    for name, tensor in make_model(17).state_dict().items():
        assert torch.equal(training.model.state_dict()[name], tensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [storm("fp32"), "fp16", storm("bf16")])
def test_a_run_that_goes_on_is_the_run_that_went_on(precision, tmp_path):
    """Dropout, order of data, loss scale, lr schedule included; in the middle of an epoch, saved in the background."""
    first, second = Training(precision=precision, zero=2), Training(precision=precision, zero=2)
    assert second.strategy.resume(tmp_path / "run") is None
    first.steps(4)
    handles = first.strategy.checkpoint(tmp_path / "run", step=4, async_=True)
    expected = first.steps(4)
    for handle in handles:
        handle.wait()
    assert second.strategy.resume(tmp_path / "run") == 4
    assert second.steps(4) == expected
    assert all(torch.equal(*each) for each in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_a_run_goes_on_from_the_memory_of_a_neighbouring_host(tmp_path, monkeypatch):
    """Two hosts, by their names; what one had in memory is lost, and the disk is away."""
    names, rank = ("a", "b"), dist.get_rank()
    monkeypatch.setattr(socket, "gethostname", lambda: names[rank])
    tiers = [tmp_path / names[rank] / "memory", tmp_path / "disk"]
    first, second = Training(zero=2), Training(zero=2)
    assert second.strategy.checkpoints("gpt", tiers=Tiers(tiers)).resume() is None
    checkpoints = first.strategy.checkpoints("gpt", tiers=Tiers(tiers, copies=2), keep_last=[1, 2])
    for step in (2, 4):
        first.steps(2)
        (handle,) = checkpoints.save(step, async_=True)
    expected = first.steps(4)
    handle.wait()
    dist.barrier()
    kept = [sorted(path.name for path in (tier / "gpt").iterdir()) for tier in tiers]
    assert kept == [["step-00000004"], ["step-00000002", "step-00000004"]]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tiers[0])
        tiers[1].rename(tmp_path / "away")
    dist.barrier()
    checkpoints = second.strategy.checkpoints("gpt", tiers=Tiers(tiers))
    assert checkpoints.latest_step() == 4
    assert checkpoints.resume() == 4
    assert checkpoints.resumed_from == str(tiers[0] / "gpt" / "step-00000004")
    assert second.steps(4) == expected
    assert all(torch.equal(*each) for each in zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_single_objects_go_to_tiers_and_come_back_from_the_nearest_one(tmp_path):
    first, second = Training(), Training()
    first.steps(2)
    tiers = [tmp_path / "memory", tmp_path / "disk"]
    for kind in ("model", "optimizer"):
        first.strategy.save(getattr(first, kind), "out", tiers=Tiers(tiers)).wait()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tiers[0])
    dist.barrier()
    for kind in ("model", "optimizer"):
        second.strategy.load(getattr(second, kind), "out", tiers=Tiers(tiers))
    assert all(torch.equal(*each) for each in zip(first.model.parameters(), second.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="plan='torch': one rank writes its files to one folder, so tiers have"):
        first.strategy.save(first.model, "model.pt", plan="torch", tiers=Tiers(tiers))


TOPOLOGIES = [
    {"zero": 3},
    {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1", "microbatches": 2}, "zero": 1},
    {"parallel": {"pipeline": 4}, "pipeline": {"microbatches": 2}},
    {},
]


@pytest.mark.parametrize(
    "topologies", [TOPOLOGIES[:2], pytest.param(TOPOLOGIES, marks=pytest.mark.storm)], ids=["two", "all"]
)
@pytest.mark.ranks(4)
def test_a_run_goes_on_under_another_topology(topologies, tmp_path):
    whole = Training(dropout=False)
    whole.steps(3)
    expected = whole.steps(5)
    for number, before in enumerate(topologies):
        first = Training(dropout=False, **before)
        first.steps(3)
        first.strategy.checkpoint(tmp_path / str(number), step=3)
        second = Training(dropout=False, **topologies[number - 1])
        assert second.strategy.resume(tmp_path / str(number)) == 3
        assert second.steps(5) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_of_several_models_the_newest_step_that_all_have_is_taken(tmp_path):
    def make():
        strategy = Strategy(zero=1)
        actor, critic = make_model(5), make_model(9)
        return strategy, strategy.initialize(
            actor, torch.optim.AdamW(actor.parameters()), critic, torch.optim.AdamW(critic.parameters())
        )

    def step(strategy, objects):
        for model, optimizer in (objects[:2], objects[2:]):
            model.eval()
            strategy.backward(model(torch.ones(2, 15)).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    strategy, objects = make()
    step(strategy, objects)
    strategy.checkpoint(tmp_path / "run", step=1)
    kept = [each.clone() for each in (*objects[0].parameters(), *objects[2].parameters())]
    step(strategy, objects)
    strategy.checkpoint(tmp_path / "run", step=2)
    if dist.get_rank() == 0:  # as if the job had died between the two
        shutil.rmtree(tmp_path / "run" / "1" / "step-00000002")
    dist.barrier()
    again, others = make()
    assert again.resume(tmp_path / "run") == 1
    found = [*others[0].parameters(), *others[2].parameters()]
    assert all(torch.equal(*each) for each in zip(kept, found, strict=True))
    assert again.steps == 2


@pytest.mark.ranks(2)
def test_old_checkpoints_stay_unless_it_is_said(tmp_path):
    training = Training()
    for step in range(5):
        training.strategy.checkpoint(tmp_path / "all", step=step)
        training.strategy.checkpoints(tmp_path / "few", keep_last=2).save(step)
    dist.barrier()
    assert len(list((tmp_path / "all").glob("step-*"))) == 5
    assert len(list((tmp_path / "few").glob("step-*"))) == 2


@pytest.mark.ranks(2)
def test_a_strategy_without_a_model_does_not_start_anew_in_silence(tmp_path):
    with pytest.raises(ValueError, match="call initialize"):
        Strategy().resume(tmp_path)
    with pytest.raises(ValueError, match="call initialize"):
        Strategy().checkpoint(tmp_path, step=1)
    with pytest.raises(ValueError, match="plan='merged': a checkpoint has plan 'huggingface' or 'peft'; pass one of"):
        Strategy().checkpoints(tmp_path, plan="merged")
    strategy = Strategy()
    model = make_model(17)
    strategy.initialize(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="plan='peft': this Sequential has no adapters, which this plan is for"):
        strategy.checkpoints(tmp_path, plan="peft").save(1)


@pytest.mark.ranks(2)
def test_another_number_of_data_loaders_is_refused_before_anything_changes(tmp_path):
    training = Training()
    training.strategy.checkpoint(tmp_path / "run", step=1)
    strategy, model = Strategy(), make_model(17)
    model, _ = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(ValueError, match="saved with 1 data loaders, and this run has 0"):
        strategy.resume(tmp_path / "run")
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_a_torch_file_that_cannot_be_put_in_place_is_everybodys_error(tmp_path):
    training = Training()
    training.strategy.save(training.model, tmp_path / "taken")
    with pytest.raises((OSError, ValueError), match="taken"):
        training.strategy.save(training.model, tmp_path / "taken", plan="torch")
    assert not (tmp_path / "taken.saving").exists()


@pytest.mark.ranks(2)
def test_save_of_a_torch_file_at_a_url_is_refused():
    training = Training()
    with pytest.raises(
        ValueError, match=r"path='memory://a/model\.pt': a single file of torch.save is written to local"
    ):
        training.strategy.save(training.model, "memory://a/model.pt", plan="torch")


@pytest.mark.ranks(2)
def test_a_file_that_is_not_there_is_named_on_every_rank(tmp_path):
    training = Training()
    with pytest.raises((OSError, ValueError), match="nothing"):
        training.strategy.load(training.model, tmp_path / "nothing.pt", plan="torch")
    with pytest.raises(CheckpointError, match="nothing"):
        training.strategy.load(training.model, tmp_path / "nothing")
