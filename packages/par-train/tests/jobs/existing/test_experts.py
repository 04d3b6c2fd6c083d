"""The job that trains a model of transformers, of models with experts that are dealt out over ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_testing import storm
from par_train.jobs import hooks, job_run
from par_train.jobs.options import DataOptions, ModelOptions, Options, TrainOptions
from par_train.run.stop import Stop

transformers = pytest.importorskip("transformers")
FAMILIES = transformers.MixtralForCausalLM, transformers.Qwen3MoeForCausalLM  # imported once, where ranks are forked

COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "Mixtral": lambda **of: transformers.MixtralConfig(intermediate_size=48, num_local_experts=4, **COMMON, **of),
    "Qwen3-MoE": lambda **of: transformers.Qwen3MoeConfig(
        intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=8, **COMMON, **of
    ),
}
TOLERANCE = 1e-4  # relative, fp32: sums in another order, which Adam enlarges where a gradient is next to nothing


def folder_of(name, tiny, path):
    """A folder with a model with experts, made by transformers, and the tokenizer of the tiny one."""
    folder = path / name
    if dist.get_rank() == 0:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny[0])
        torch.manual_seed(0)
        config = CONFIGS[name](vocab_size=len(tokenizer), max_position_embeddings=128)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for each in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(tiny[0], each), folder)
    dist.barrier()
    return folder


def losses_of(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("name", [storm("Mixtral"), "Qwen3-MoE"])
def test_experts_over_ranks_are_fine_tuned_as_copies_and_opened_by_transformers(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "draw_loss", lambda *_, **__: None)
    source = folder_of(name, tiny, tmp_path)
    steps = TrainOptions(steps=4, batch_size=4, validate_every=4, learning_rate=1e-3, warmup_steps=1)
    data = DataOptions(path=str(tiny[1]["jsonl"]), context=64, validation_fraction=0.2, validation_windows=4)
    runs = {
        "copies": {},
        "dealt": {"parallel": {"expert": 2}, "zero": 1},
        "folded": {"parallel": {"expert": {"size": 2, "tensor": 1}, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3},
    }
    for run, changes in runs.items():
        options = Options(
            output=str(tmp_path / run),
            device="cpu",
            model=ModelOptions(path=str(source)),
            data=data,
            train=steps,
            **changes,
        )
        assert job_run.train(options, Stop()) == 0
    dist.barrier()
    if dist.get_rank():
        return
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    opened = {
        run: transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / run / "checkpoints" / "step-00000004"
        ).state_dict()
        for run in runs
    }
    for run in ("dealt", "folded"):
        assert losses_of(tmp_path / run) == pytest.approx(losses_of(tmp_path / "copies"), rel=TOLERANCE), run
        for key, tensor in opened[run].items():
            expected = opened["copies"][key]
            assert tensor.shape == before[key].shape, key
            moved, whole = (tensor - before[key]).double().flatten(), (expected - before[key]).double().flatten()
            if whole.norm() > 0:
                assert torch.nn.functional.cosine_similarity(moved, whole, dim=0) > 0.99, f"{run}: {key}"
