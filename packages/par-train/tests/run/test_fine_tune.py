"""The example that fine-tunes a model of transformers: the same run under other ranks, and a folder that opens."""

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune.py"
FLAGS = ["--context=128", "--batch-size=4", "--learning-rate=1e-3", "--held-out=0.2", "--device=cpu"]


def fine_tune(*words, is_cut=False):
    spec = importlib.util.spec_from_file_location("fine_tune", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    elements = []

    class Watched(module.Strategy):
        """Notes how much of the model a rank reads."""

        def from_pretrained(self, *args, **keywords):
            model = super().from_pretrained(*args, **keywords)
            elements.append(sum(parameter.numel() for parameter in model.parameters()))
            return model

    module.Strategy = Watched
    code = module.main([*map(str, words), *FLAGS])
    whole = transformers.AutoModelForCausalLM.from_pretrained(words[0]).num_parameters()
    assert (elements[0] < 0.7 * whole) == is_cut
    return code


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def validation_losses(folder):
    return [line["validation_loss"] for line in lines_of(folder) if "validation_loss" in line]


def check_opens(folder, source):
    """The folder is one of transformers', with the very same tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (
        tokenizer("one \u00e9")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(source)("one \u00e9")["input_ids"]
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 3
    return model


@pytest.mark.ranks(2, timeout=240)
def test_a_run_that_goes_on_under_other_stages_and_axes_is_the_run_that_was_never_stopped(tiny, tmp_path):
    model, corpora = tiny
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fine_tune(model, corpora["chat"], whole, "--steps=8", "--validate-every=2", "--zero=0") == 0
    assert fine_tune(model, corpora["chat"], parts, "--steps=3", "--validate-every=2", "--zero=3") == 0
    pipeline = ["--pipeline=2", "--microbatches=2"]
    again = [model, corpora["chat"], parts, "--steps=6", "--validate-every=2", "--zero=1", *pipeline]
    assert fine_tune(*again, is_cut=True) == 0
    again = [model, corpora["chat"], parts, "--steps=8", "--validate-every=2", "--zero=0", "--tensor=2"]
    assert fine_tune(*again, is_cut=True) == 0
    dist.barrier()
    assert [line["step"] for line in lines_of(parts)] == list(range(1, 9))
    # fp32: sums in another order, which Adam's division makes larger where a gradient is next to nothing.
    assert validation_losses(parts) == pytest.approx(validation_losses(whole), rel=1e-4)
    assert validation_losses(whole)[-1] < validation_losses(whole)[0] < 6.3, "log(512) is 6.24"
    if dist.get_rank() == 0:
        models = [check_opens(folder / "checkpoints" / "step-00000008", model) for folder in (whole, parts)]
        before = transformers.AutoModelForCausalLM.from_pretrained(model)
        moved = [
            torch.cat([(a - b).flatten() for a, b in zip(m.parameters(), before.parameters(), strict=True)])
            for m in models
        ]
        assert torch.nn.functional.cosine_similarity(moved[0], moved[1], dim=0) > 0.999, "they went the same way"
    dist.barrier()


def test_stopped_by_a_signal_on_two_ranks_it_goes_on_with_one(tiny, tmp_path, warm_python):
    model, corpora = tiny
    folder = tmp_path / "run"

    def start(ranks, *words):
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"] if ranks > 1 else []
        words = [*torchrun, str(EXAMPLE), str(model), str(corpora["jsonl"]), str(folder), *FLAGS, *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return warm_python.start(words, folder=tmp_path, environment=environment, ranks=ranks if ranks > 1 else 0)

    def finish(process):
        try:
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return process.returncode, err

    process = start(2, "--steps=1000000", "--packing=stream")
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(lines_of(folder)) < 3:
        assert time.monotonic() < deadline, "it did not begin"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = finish(process)
    step = lines_of(folder)[-1]["step"]
    assert f"SIGTERM: saved after step {step}" in err, err
    code, err = finish(start(1, f"--steps={step + 2}", "--packing=stream"))
    assert code == 0, err
    assert [line["step"] for line in lines_of(folder)] == list(range(1, step + 3))
    assert len(list((folder / "data").iterdir())) == 1, "the tokens were made once"
    check_opens(folder / "checkpoints" / f"step-{step + 2:08d}", model)
