"""The example of a loop of one's own that fine-tunes a model of transformers."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = ["--context=64", "--batch-size=4", "--learning-rate=1e-3", "--device=cpu"]


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft asks it of a model
@pytest.mark.ranks(2, timeout=120)
def test_the_example_of_an_adapter_trains_alike_and_peft_opens_it(tiny, tmp_path):
    peft = pytest.importorskip("peft")
    program, (model, corpora) = example("adapter"), tiny
    for name, flags in (("data", []), ("tensor", ["--tensor=2"])):
        words = [str(model), str(corpora["chat"]), str(tmp_path / name), *FLAGS[:2], "--device=cpu", "--steps=10"]
        assert program.main([*words, "--rank=4", *flags]) == 0
    dist.barrier()
    found = [json.loads((tmp_path / name / "metrics.jsonl").read_text())["loss"] for name in ("data", "tensor")]
    assert found[1] == pytest.approx(found[0], rel=1e-3), "of two replicas it is a mean of means"
    if dist.get_rank() == 0:
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        opened = peft.PeftModel.from_pretrained(base, tmp_path / "tensor" / "adapter")
        assert any(each.abs().sum() > 0 for name, each in opened.named_parameters() if "lora_B" in name)


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=120)
def test_the_example_goes_on_under_other_ranks_and_leaves_a_folder_that_opens(tiny, tmp_path):
    program, (model, corpora) = example("fine_tune"), tiny
    words = [str(model), str(corpora["chat"]), str(tmp_path / "run"), *FLAGS]
    assert program.main([*words, "--steps=10", "--tensor=2"]) == 0
    assert program.main([*words, "--steps=20", "--pipeline=2"]) == 0
    assert program.main([*words, "--steps=30", "--sequence=2"]) == 0
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
