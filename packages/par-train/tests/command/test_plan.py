"""`par-train plan`, from a config file to what it prints. In this process: it starts no other."""

import json

import pytest

from par_train.command.cli import main

CONFIG = """
precision = "bf16"
zero = 1

[model]
width = 512
layers = 8
heads = 8
context = 256

[train]
batch_size = 64
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def planned(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_plan(config, capsys):
    code, out, err = planned(capsys, config, "--world", 16, "--device-memory", "80GB", "--top", 3)
    assert (code, err) == (0, "")
    assert "Best of each topology" in out
    assert "Configured" not in out  # the file has no table parallel
    assert len(out[out.index("Best") : out.index("Of these the first")].splitlines()) == 1 + 1 + 3


def test_the_configured_one_is_predicted_beside_the_best(config, capsys):
    flags = ["--parallel.pipeline", "4", "--parallel.tensor.mode", "1d", "--pipeline.schedule=zb_h1"]
    code, out, _ = planned(capsys, config, "--world", 16, "--device-memory", "80GB", *flags)
    assert code == 0
    configured = out[out.index("Configured") :].split("\n\n")[0]
    assert configured.splitlines()[2].split()[:7] == ["1", "4", "1d", "4", "1", "zb_h1", "8"]


def test_figures_for_programs(config, tmp_path, capsys):
    path = tmp_path / "plan.json"
    code, *_ = planned(capsys, config, "--world=16", "--device-memory=80GiB", f"--json={path}", "--flops=1e12")
    found = json.loads(path.read_text())
    assert code == 0
    assert found["machine"]["memory"] == 80 * 2**30
    assert found["machine"]["flops"] == 1e12
    assert len(found["best"]) == 10


def test_the_peak_is_that_of_the_precision(config, capsys):
    for precision, peak in (("fp32", "6.7e+13"), ("bf16", "9.89e+14"), ("fp8", "1.979e+15")):
        _, out, _ = planned(capsys, config, "--world=8", "--device-memory=80GB", f"--precision={precision}")
        assert f"{peak} FLOP/s" in out


def test_a_pipeline_that_tensor_ranks_cannot_cut_is_a_mistake(config, capsys):
    flags = ["--parallel.pipeline=2", "--parallel.tensor.mode=2d", "--parallel.tensor.size=4"]
    code, out, err = planned(capsys, config, "--world=8", "--device-memory=80GB", *flags, "--pipeline.microbatches=64")
    assert (code, out) == (2, "")
    assert "the rows of a microbatch is 1, which tensor mode 2d 2x2 cuts into 2 parts" in err


def test_a_file_that_cannot_be_written_is_a_mistake(config, tmp_path, capsys):
    code, _, err = planned(capsys, config, "--world=8", "--device-memory=80GB", f"--json={tmp_path}/none/plan.json")
    assert code == 2
    assert "name another file with --json" in err
