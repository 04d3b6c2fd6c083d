"""The examples, each on two ranks as on one: a reader starts them, and their losses do not depend on how."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from par_testing import storm

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-4  # relative, fp32: sums in another order, which Adam enlarges where a gradient is next to nothing

RUNS = {
    "pretrain_gpt": (
        ["--width=64", "--depth=1", "--context=32", "--batch-size=8", "--files=3", "--steps=20", "--zero=0"],
        [["--sequence=2"], ["--tensor=2", "--recompute=cheap"]],
        "loss",
    ),
    "vision_transformer": (["--batch-size=16", "--steps=20", "--zero=0"], [["--zero=3", "--recompute=cheap"]], "loss"),
    "long_context": (
        ["--context=96", "--window=40", "--steps=20"],
        [["--mode=ring"], ["--mode=gather", "--zero=3"]],
        "loss",
    ),
    "mixture_of_experts": (
        ["--batch-size=16", "--steps=20"],
        [["--expert=2", "--zero=3"], ["--expert=2", "--tensor=2", "--zero=1", "--recompute=layers"]],
        "loss",
    ),
    "actor_critic": (["--batch-size=16", "--steps=20"], [["--tensor=2", "--zero=3"]], "reward"),
}
OTHERS = ("mixture_of_experts", "vision_transformer", "long_context", "actor_critic")


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(folder, column):
    return [json.loads(line)[column] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("name", ["pretrain_gpt", *map(storm, OTHERS)])
@pytest.mark.parametrize("count", [1, storm(2)])
def test_an_example_trains_alike_however_its_ranks_share(name, count, tmp_path):
    flags, ways, column = RUNS[name]
    ways = ways[-count:]
    program = example(name)
    plain = ["--mode=ulysses"] if name == "long_context" else []  # of two replicas the logged mean is one of means
    assert program.main([str(tmp_path / "plain"), "--device=cpu", *flags, *plain]) == 0
    for number, way in enumerate(ways):
        assert program.main([str(tmp_path / str(number)), "--device=cpu", *flags, *way]) == 0
    dist.barrier()
    expected = curve(tmp_path / "plain", column)
    for number, way in enumerate(ways):
        assert curve(tmp_path / str(number), column) == pytest.approx(expected, rel=TOLERANCE), way
    assert expected[-1] > expected[0] if column == "reward" else expected[-1] < expected[0]
