"""The example of a loop of one's own that fine-tunes a model of transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "fine_tune.py"
FLAGS = ["--context=64", "--batch-size=4", "--learning-rate=1e-3", "--device=cpu"]


@pytest.mark.ranks(2, timeout=120)
def test_the_example_goes_on_under_other_ranks_and_leaves_a_folder_that_opens(tiny, tmp_path):
    spec = importlib.util.spec_from_file_location("fine_tune", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, corpora = tiny
    words = [str(model), str(corpora["chat"]), str(tmp_path / "run"), *FLAGS]
    assert example.main([*words, "--steps=10", "--tensor=2"]) == 0
    assert example.main([*words, "--steps=20", "--pipeline=2"]) == 0
    assert example.main([*words, "--steps=30", "--sequence=2"]) == 0
    dist.barrier()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30]
    assert lines[2]["loss"] < lines[1]["loss"] < lines[0]["loss"] < 6.3, "log(512) is 6.24"
    assert lines[2]["tokens"] - lines[1]["tokens"] == lines[0]["tokens"] == 10 * 4 * 64
    if dist.get_rank() == 0:
        folder = tmp_path / "run" / "checkpoints" / "step-00000030"
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("def ", return_tensors="pt")
        write = transformers.AutoModelForCausalLM.from_pretrained(folder).generate
        assert write(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]
