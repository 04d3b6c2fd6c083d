"""Trainer and Accelerate on a strategy that deals experts out: a mixture of experts as on one process."""

import pytest
import torch
from torch.utils.data import DataLoader

from par_testing import once

from ..tiny_llama import TEXT
from .alone import alone, rows

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")
ParAccelerator = pytest.importorskip("par_train.adapters.accelerate").ParAccelerator
ParTrainer = pytest.importorskip("par_train.adapters.transformers").ParTrainer
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

TOLERANCE = 1e-5  # fp32: sums over ranks in another order
DEALT = {
    "own axis": ({"parallel": {"expert": 2}, "zero": 1}, 2),
    "folded": ({"parallel": {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}}, 1),
}
"""Options of a strategy, and the number of ranks that see other rows."""


def mixture():
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**TEXT, "num_local_experts": 4}))


def trained(kind, folder, batch, **options):
    """Losses and norms of two steps of transformers' Trainer, or of ours."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = kind(mixture(), arguments, train_dataset=list(rows(16)), **options)
    trainer.train()
    found = [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    return trainer, found


def trained_alone(folder):
    with alone():
        return trained(transformers.Trainer, folder, 4)[1]


@pytest.mark.ranks(2, timeout=120)
def test_a_trainer_trains_a_mixture_of_experts(tmp_path):
    expected = once(trained_alone, tmp_path / "alone")
    assert len(expected) == 2
    for name, (strategy, replicas) in DEALT.items():
        trainer, found = trained(ParTrainer, tmp_path / name, 4 // replicas, strategy=strategy)
        assert found == [pytest.approx(line, rel=TOLERANCE) for line in expected], name
        assert len(trainer.model.model.layers[0].mlp.experts.down_proj) == 2
        trainer.strategy.close()


def balanced(kind, folder, batch, accumulate, **options):
    """The loss of a step and of an evaluation with the balance of routers, and a router's weights after the step."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = mixture()
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 1.0
    same = [next(iter(rows(1)))] * 4  # so that the balance of a part is that of the whole batch
    trainer = kind(model, arguments, train_dataset=same, eval_dataset=same, **options)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    (loss,) = (line["loss"] for line in trainer.state.log_history if "loss" in line)
    return [loss, evaluated], model.model.layers[0].mlp.gate.weight.detach()


def balanced_alone(folder):
    with alone():
        return balanced(transformers.Trainer, folder, 4, 1)


@pytest.mark.ranks(2, timeout=120)
def test_the_balance_of_routers_counts_once_a_step(tmp_path):
    """Over data ranks, tensor ranks and parts of a batch: it is a mean already, and the Trainer adds up its losses."""
    losses, router = once(balanced_alone, tmp_path / "alone")
    cut = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
    for batch, accumulate, strategy in ((2, 1, {}), (1, 2, {}), (1, 4, cut)):
        where = tmp_path / f"{batch} {accumulate}"
        found, weight = balanced(ParTrainer, where, batch, accumulate, strategy=strategy)
        assert found == pytest.approx(losses, rel=TOLERANCE)
        torch.testing.assert_close(weight, router, rtol=TOLERANCE, atol=1e-6)  # fp32: sums in another order


def looped(accelerator):
    """Losses and norms of two steps."""
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(8)]
    model = mixture()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=4)
    )
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((accelerator.gather(loss.detach()).mean().item(), float(norm)))
    return found


def loop_alone():
    with alone():
        return looped(accelerate.Accelerator(cpu=True))


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_accelerate_trains_a_mixture_of_experts():
    expected = once(loop_alone)
    assert len(expected) == 2
    for name, (strategy, _) in DEALT.items():
        split = accelerate.DataLoaderConfiguration(split_batches=True)
        accelerator = ParAccelerator(strategy=strategy, cpu=True, dataloader_config=split)
        found = looped(accelerator)
        accelerator.strategy.close()
        assert found == [pytest.approx(line, rel=TOLERANCE) for line in expected], name
