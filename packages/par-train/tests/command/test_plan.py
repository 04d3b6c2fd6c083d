"""`par-train plan`, from a config file to what it prints. In this process: it starts no other."""

import json
import re
import shutil

import pytest

from par_train._errors import UserError
from par_train.command.cli import main
from par_train.command.plan import pretrained_shape
from par_train.jobs.options import AdapterOptions, ModelOptions, Options

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
    assert "Best configuration of each topology" in out
    assert "Your configuration" not in out  # the file has no table parallel
    assert len(out[out.index("Best") : out.index("Traffic of the first")].splitlines()) == 1 + 1 + 3


def test_sequences_are_cut_as_asked_and_the_report_says_how(config, capsys):
    flags = [
        "--model.context=8192",
        "--train.batch_size=16",
        "--parallel.sequence.size=2",
        "--parallel.sequence.mode=ring",
    ]
    code, out, _ = planned(capsys, config, "--world", 16, "--device-memory", "80GB", *flags)
    assert code == 0
    configured, best, *_ = out[out.index("Your configuration") :].split("\n\n")
    assert configured.splitlines()[2].split()[:4] == ["8", "1", "ring", "2"]
    assert "over data x sequence: " in configured
    assert re.search(r"over sequence: .* of keys and values, \d+ operations", configured)
    assert best.splitlines()[1].split()[:3] == ["data", "pipeline", "sequence"]
    code, out, _ = planned(capsys, config, "--world", 16, "--device-memory", "80GB", "--sequence=1", *flags[:2])
    assert code == 0
    assert "sequence " not in out  # no such column
    code, _, err = planned(capsys, config, "--world", 16, "--device-memory", "80GB", "--sequence=0")
    assert code == 2
    assert "sequence" in err


def test_the_configured_one_is_predicted_beside_the_best(config, capsys):
    flags = ["--parallel.pipeline", "4", "--parallel.tensor.mode", "1d", "--pipeline.schedule=zb_h1"]
    code, out, _ = planned(capsys, config, "--world", 16, "--device-memory", "80GB", *flags)
    assert code == 0
    configured = out[out.index("Your configuration") :].split("\n\n")[0]
    assert configured.splitlines()[2].split()[:7] == ["1", "4", "1d", "4", "1", "zb_h1", "8"]


def test_tiers_are_planned_and_the_one_that_binds_is_named(config, tmp_path, capsys):
    figures = tmp_path / "tiers.json"
    flags = ["--world", "1", "--device-memory", "60MB", "--host-memory", "512MB", "--disk", "1GB"]
    flags += ["--devices-per-node", "1", "--disk-read", "7GB", "--json", str(figures)]
    assert main(["plan", str(config), "--model.width=256", *flags]) == 0
    told = capsys.readouterr().out
    assert "opt " in told
    assert " host" in told
    assert "Device memory is the limit" in told
    best = json.loads(figures.read_text())["best"][0]
    assert best["optimizer"]["host"] > 0
    assert best["memory"]["host"] > 0
    assert main(["plan", str(config), "--model.width=256", *flags[:4]]) == 0
    assert "Nothing fits" in capsys.readouterr().out
    assert main(["plan", str(config), "--model.width=256", *flags[:4], "--host-memory", "1MB"]) == 0
    assert "The host is the limit: add capacity there, or add devices." in capsys.readouterr().out


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


@pytest.fixture
def llama(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.4")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 1001}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    transformers.LlamaConfig(**sizes, **heads).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_model_of_transformers_is_planned_from_its_config(llama, tmp_path, capsys):
    path = tmp_path / "plan.json"
    flags = ["--world=16", "--device-memory=80GB", "--precision=bf16", "--train.batch_size=64", f"--json={path}"]
    own = [
        "--parallel.pipeline=2",
        "--parallel.tensor.mode=1d",
        "--parallel.tensor.size=4",
        "--parallel.tensor.kv_heads=2",
    ]
    for folder in (llama, llama / "config.json"):
        code, out, err = planned(capsys, f"--model.path={folder}", "--data.context=256", *flags, *own)
        assert (code, err) == (0, "")
        assert "LlamaForCausalLM, 8 layers, width 256, 8 heads, context 256, vocabulary 1001" in out
        assert out[out.index("Your configuration") :].splitlines()[2].split()[:4] == ["2", "2", "1d", "4"]
    found = json.loads(path.read_text())
    assert found["model"]["class"] == "LlamaForCausalLM"
    assert found["configured"]["memory"]["activations"] > 0
    assert {each["parallel"].get("tensor", {}).get("mode") for each in found["best"]} <= {None, "1d"}
    assert not (llama / "model.safetensors").exists()  # there was nothing to read


def test_a_family_without_a_plan_is_planned_without_tensor_ranks(llama, capsys):
    transformers = pytest.importorskip("transformers", minversion="5.4")
    shutil.rmtree(llama)
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2, "vocab_size": 101}
    config = transformers.OPTConfig(num_attention_heads=4, max_position_embeddings=64, **sizes)
    config.save_pretrained(llama)
    flags = [f"--model.path={llama}", "--world=4", "--device-memory=80GB", "--train.batch_size=16"]
    code, out, _ = planned(capsys, *flags)
    assert code == 0
    assert "tensor   not planned: OPTForCausalLM has no plan for tensor parallelism" in out
    assert "stages   not planned" not in out
    code, out, err = planned(capsys, *flags, "--parallel.tensor.mode=1d")
    assert (code, out) == (2, "")
    assert "register it with register_plan" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.path=nowhere"], "'nowhere' holds no config.json; give the folder of a model"),
        (["--model.path={llama}", "--data.context=513"], "has 512 positions; use at most as many"),
        (["--model.path={llama}", "--parallel.tensor.mode=2d"], "use mode '1d'"),
        (["--model.path={llama}", "--parallel.tensor.mode=1d"], "2 units of 32 features do not divide by 4 ranks"),
    ],
)
def test_what_cannot_be_planned_of_a_model_of_transformers(flags, words, llama, capsys):
    flags = [flag.format(llama=llama) for flag in flags]
    code, out, err = planned(capsys, *flags, "--world=4", "--device-memory=80GB")
    assert (code, out) == (2, "")
    assert words in err


def test_an_adapter_is_not_planned(llama):
    options = Options(model=ModelOptions(path=str(llama)), adapter=AdapterOptions(rank=8))
    with pytest.raises(UserError, match=r"adapter\.rank is 8, and par-train plan knows .* leave \[adapter\] out"):
        pretrained_shape(options)


def test_experts_that_a_model_has_not_are_refused_in_one_line(config, capsys):
    assert main(["plan", str(config), "--world", "8", "--device-memory", "80GB", "--parallel.expert", "2"]) == 2
    assert "but model.experts is 0" in capsys.readouterr().err
