"""transformers' Trainer on a strategy: what its own does on one process, over any ranks."""

import json

import pytest
import torch
import torch.distributed as dist

from par_testing import once
from par_train import Strategy

from .alone import alone, make_model, rows

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
ParTrainer = pytest.importorskip("par_train.adapters.transformers").ParTrainer
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

TOLERANCE = 1e-5
CUT = {"size": 2, "mode": "1d"}
TIMES = ("runtime", "per_second")
TRAINED = 4  # steps of 8 rows, in two batches each


class Notes(transformers.TrainerCallback):
    """The names of all that is called, in order."""

    def __init__(self):
        self.called = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            object.__getattribute__(self, "called").append(name)
        return object.__getattribute__(self, name)


def arguments(folder, batch=4, **options):
    defaults = {
        "gradient_accumulation_steps": 2,
        "max_steps": TRAINED,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "dataloader_pin_memory": False,
    }
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    return transformers.TrainingArguments(output_dir=str(folder), **sizes, **{**defaults, **options})


def told(trainer, notes):
    """What a trainer told: all numbers but times, the callbacks, and what it predicts in the end."""
    history = [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in trainer.state.log_history]
    predicted = trainer.predict(list(rows(8)))
    return history, list(notes.called), predicted.predictions, predicted.metrics["test_loss"]


def trained_alone(folder, **options):
    """transformers' own Trainer on this process alone."""
    with alone():
        notes = Notes()
        data = {"train_dataset": list(rows()), "eval_dataset": list(rows(8))}
        trainer = transformers.Trainer(make_model(), arguments(folder, **options), callbacks=[notes], **data)
        trainer.train()
        return told(trainer, notes)


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE), (mine, theirs)
    assert found[1] == expected[1]
    torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(expected[2]), rtol=1e-4, atol=1e-4)
    assert found[3] == pytest.approx(expected[3], rel=TOLERANCE)


def make_trainer(folder, strategy, *, resume_of=None, data_ranks=1, model=None, **options):
    notes = Notes()
    trainer = ParTrainer(
        make_model() if model is None else model,
        arguments(folder, batch=4 // data_ranks, **options),
        train_dataset=list(rows()),
        eval_dataset=list(rows(8)),
        callbacks=[notes],
        strategy=strategy,
    )
    return trainer, notes


CASES_2 = {
    "stage 3": ({"zero": 3}, 2),
    "tensor": ({"parallel": {"tensor": CUT}, "zero": 1}, 1),
    "pipeline": ({"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}}, 1),
}


@pytest.mark.ranks(2, timeout=150)
def test_a_run_is_that_of_one_process(tmp_path):
    """Losses, norms, evaluations, callbacks, the best model, predictions; a topology goes on from another's files."""
    expected = once(trained_alone, tmp_path / "alone")
    assert [line["eval_loss"] for line in expected[0] if "eval_loss" in line]
    before = None
    for name, (strategy, data_ranks) in CASES_2.items():
        folder = tmp_path / name
        trainer, notes = make_trainer(folder, strategy, data_ranks=data_ranks)
        trainer.train()
        assert_same(told(trainer, notes), expected)
        if before is not None:  # goes on in the middle of what ran over other axes
            again, notes = make_trainer(tmp_path / f"{name}, again", strategy, data_ranks=data_ranks)
            again.train(resume_from_checkpoint=str(before / "checkpoint-2"))
            history, _, *predicted = told(again, notes)
            assert_same((history[:-1], (), *predicted), (expected[0][:-1], (), *expected[2:]))  # the last: this call's
            again.strategy.close()
        trainer.save_model()
        trainer.strategy.close()
        before = folder
        check_folder(folder, trainer)


def check_folder(folder, trainer):
    """What would be pushed: the files that transformers' own Trainer writes, and what says how they were written."""
    if dist.get_rank() > 0:
        return
    layout = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin", "par_checkpoint.json"}
    assert {path.name for path in folder.iterdir() if path.is_file()} == layout
    best = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best == trainer.state.best_model_checkpoint
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    chosen = transformers.AutoModelForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(saved[name], chosen[name]) for name in chosen)


@pytest.mark.ranks(2, timeout=120)
def test_what_can_come_before_training_and_after_it(tmp_path):
    """An evaluation prepares the model once; a second train() goes on with the same."""
    trainer, _ = make_trainer(tmp_path, {"parallel": {"tensor": CUT}}, save_strategy="no", load_best_model_at_end=False)
    first = trainer.evaluate()["eval_loss"]
    labels = {key: torch.stack([row[key] for row in rows(8)]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        halves = [{key: value[part] for key, value in labels.items()} for part in (slice(4), slice(4, 8))]
        assert first == pytest.approx(sum(float(make_model()(**half).loss) for half in halves) / 2, rel=TOLERANCE)
    trainer.train()
    trained = trainer.evaluate()["eval_loss"]
    assert trained < first
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < trained
    with pytest.raises(ValueError, match="start each trial as a run of its own"):
        trainer.hyperparameter_search()
    trainer.strategy.close()


@pytest.mark.ranks(2, timeout=120)
def test_sequences_that_are_cut(tmp_path):
    expected = once(trained_alone, tmp_path / "alone", save_strategy="no", load_best_model_at_end=False)[0]
    strategy = {"parallel": {"sequence": {"size": 2, "mode": "ring"}}, "zero": 2}
    trainer, _ = make_trainer(tmp_path, strategy, save_strategy="no", load_best_model_at_end=False)
    trainer.train()
    history = [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in trainer.state.log_history]
    for mine, theirs in zip(history, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)
    with pytest.raises(ValueError, match="of sequences that are cut over ranks; give prediction_loss_only=True"):
        trainer.predict(list(rows(4)))
    trainer.strategy.close()


def adapted():
    peft = pytest.importorskip("peft")
    model = make_model()
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def adapted_alone(folder):
    with alone():
        trainer = transformers.Trainer(
            adapted(), arguments(folder), train_dataset=list(rows()), eval_dataset=list(rows(8))
        )
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
@pytest.mark.ranks(2, timeout=120)
def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")
    expected = once(adapted_alone, tmp_path / "alone")
    trainer, _ = make_trainer(tmp_path / "cut", {"parallel": {"tensor": CUT}}, model=adapted())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    again, _ = make_trainer(tmp_path / "again", {"zero": 3}, model=adapted(), data_ranks=2)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert [line["loss"] for line in again.state.log_history if "loss" in line] == pytest.approx(
        expected, rel=TOLERANCE
    )
    if dist.get_rank() == 0:
        opened = peft.PeftModel.from_pretrained(make_model(), again.state.best_model_checkpoint)
        assert any("lora_A" in name for name, _ in opened.named_parameters())
    trainer.strategy.close()
    again.strategy.close()


REFUSED = {
    "fsdp": ({"fsdp": True}, {}, r"fsdp=True; leave it out and give strategy=dict\(zero=3\)"),
    "unused": (
        {"ddp_find_unused_parameters": False},
        {},
        "ddp_find_unused_parameters=False; leave it out and give nothing",
    ),
    "compile": ({"torch_compile": True}, {}, "torch_compile=True; leave it out and give a plugin"),
    "batch": ({"auto_find_batch_size": True}, {}, "per_device_train_batch_size; Strategy.plan"),
    "clip": ({}, {"clip_norm": 1.0}, "TrainingArguments(max_grad_norm=...) says it"),
    "precision": ({"bf16": True}, {"precision": "bf16"}, "both say how to compute; give one"),
    "stage 3": ({"bf16": True}, {"zero": 3}, "use precision='bf16', which gathers weights in 16 bits"),
    "again": ({"activation_checkpointing": True}, {"recompute": "layers"}, "both compute again; give one"),
    "smoothing": (
        {"label_smoothing_factor": 0.1},
        {"parallel": {"pipeline": 2}},
        "label_smoothing_factor, and over pipeline=2",
    ),
    "rebalance": (
        {"train_sampling_strategy": "batch_rebalance"},
        {"parallel": {"tensor": CUT}},
        "use 'random' or 'group_by_length'",
    ),
}


@pytest.mark.ranks(2)
def test_what_has_no_counterpart_is_refused_on_every_rank(tmp_path):
    for options, strategy, words in REFUSED.values():
        chosen = {"load_best_model_at_end": False, "save_strategy": "no", **options}
        with pytest.raises(ValueError, match=words.replace("(max", r"\(max").replace("...)", r"\.\.\.\)")):
            make_trainer(tmp_path, strategy, **chosen)
    with Strategy() as strategy, pytest.raises(ValueError, match="save the one you gave"):
        make_trainer(tmp_path, strategy)[0].save_model()
    options = {"save_only_model": True, "load_best_model_at_end": False, "eval_strategy": "no", "max_steps": 2}
    with Strategy() as strategy:
        trainer, _ = make_trainer(tmp_path, strategy, data_ranks=2, **options)
        trainer.train()
        with pytest.raises(ValueError, match="has no folder `optimizer`"):
            trainer.train(resume_from_checkpoint=True)
    token_labels = transformers.LlamaForTokenClassification(make_model().config)
    for parallel, over in (({"sequence": 2}, "sequence=2"), ({"pipeline": 2}, "pipeline=2")):
        with pytest.raises(ValueError, match=f"{over}: there the loss of a ParTrainer is that of the next token"):
            make_trainer(tmp_path, {"parallel": parallel}, model=token_labels)


def test_it_says_which_extra_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "accelerate", None)
    for module in ("par_train.adapters.accelerate", "par_train.adapters._accelerated"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(
        ImportError, match=r"needs accelerate, which is not installed; the extra par-train\[accelerate\] has it"
    ):
        import par_train.adapters.accelerate  # noqa: F401


def words():
    """A tokenizer of made-up words, and rows of text."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(90))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 90, (5 + row % 9,), generator=generator).tolist() for row in range(32)]
    return fast, [{"text": " ".join(f"w{number}" for number in numbers)} for numbers in drawn]


def fine_tuned(kind, folder, batch, **options):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer, texts = words()
    chosen = {
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
    }
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_length=16,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **chosen,
    )
    data = datasets.Dataset.from_list(texts)
    trainer = kind(make_model(), arguments, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    told = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    return [[line[name] for name in told] for line in trainer.state.log_history if "loss" in line]


def fine_tuned_alone(folder):
    with alone():
        return fine_tuned(pytest.importorskip("trl").SFTTrainer, folder, 4)


@pytest.mark.filterwarnings("ignore")  # of TRL and what it brings
@pytest.mark.ranks(2, timeout=120)
def test_the_sft_trainer_of_trl(tmp_path):
    """Its own loss and metrics at stage 3; refused over tensor ranks, where it would take some words for all."""
    trl = pytest.importorskip("trl")
    mixin = pytest.importorskip("par_train.adapters.transformers").ParTrainerMixin

    class ParSFTTrainer(mixin, trl.SFTTrainer): ...

    expected = once(fine_tuned_alone, tmp_path / "alone")
    with Strategy(zero=3) as strategy:
        found = fine_tuned(ParSFTTrainer, tmp_path, 2, strategy=strategy)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE, abs=1e-6)
    with pytest.raises(ValueError, match="this ParSFTTrainer has a compute_loss of its own, and over tensor=2"):
        fine_tuned(ParSFTTrainer, tmp_path, 4, strategy={"parallel": {"tensor": CUT}})


@pytest.mark.ranks(2, timeout=120)
def test_trained_model_runs_its_causal_loss_in_execute_pipeline(tmp_path):
    """The Trainer wraps the model's loss function, which stays the causal one."""
    for strategy in ({}, {"parallel": {"tensor": CUT}}):
        trainer = ParTrainer(
            make_model(),
            arguments(tmp_path, max_steps=1, eval_strategy="no", save_strategy="no", load_best_model_at_end=False),
            train_dataset=list(rows()),
            strategy=strategy,
        )
        trainer.train()
        batch = {"input_ids": torch.stack([row["input_ids"] for row in rows(2)])}
        model = trainer.model_wrapped
        loss = trainer.strategy.execute_pipeline(iter([batch]), model, None, forward_only=True)
        with torch.no_grad():
            expected = model(**batch, labels=batch["input_ids"]).loss
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)  # fp32: a mean in another order
        trainer.strategy.close()
