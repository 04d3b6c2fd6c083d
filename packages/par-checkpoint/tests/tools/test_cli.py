"""The command, as a shell calls it."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import nn

import par_checkpoint
from par_checkpoint import Checkpoints, Format, save
from par_checkpoint.tools.cli import main


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))


@pytest.fixture
def saved(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    save(tmp_path / "a", model=model, optimizer=optimizer, step=4)
    return tmp_path / "a"


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("ls", "verify", "diff", "convert", "prune"))


def test_ls_sums_up_and_lists(saved, capsys):
    assert main(["ls", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "huggingface style, step 4, 4 tensors with 56 elements, optimizer with 1 groups and 4 tensors" in text
    assert "0.weight.momentum_buffer" in text
    assert "[7, 5]" in text


def test_ls_of_a_run_lists_its_steps(tmp_path, model, capsys):
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, model=model)
    (tmp_path / "run/step-00000002/par_checkpoint.json").unlink()
    assert main(["ls", str(tmp_path / "run")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step-00000001  step 1  ")
    assert second.endswith("not whole: no sound manifest")


def test_verify_names_what_is_wrong(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    assert main(["verify", str(saved)]) == 1
    assert "block 0 of" in capsys.readouterr().out
    assert main(["verify", "--shallow", str(saved)]) == 0


def test_diff_finds_each_difference(tmp_path, saved, model, capsys):
    with torch.no_grad():
        model[0].weight[0, 0] += 0.5
    save(tmp_path / "b", model={**model.state_dict(), "new": torch.ones(1), "1.bias": torch.zeros(8)})
    assert main(["diff", str(saved), str(saved)]) == 0
    assert main(["diff", str(saved), str(tmp_path / "b")]) == 1
    text = capsys.readouterr().out
    assert "0.weight: 1 of 35 elements differ, by 0.5 at most" in text
    assert f"new: only in {tmp_path / 'b'}" in text
    assert "1.bias: torch.float32 [7] against torch.float32 [8]" in text
    assert "3 tensors differ" in text


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_convert_there_and_back(tmp_path, saved, model, capsys):
    for number, (source, target, to) in enumerate(
        [(saved, "t", "torch"), ("t", "d", "dcp"), ("d", "h", "huggingface"), ("t/model.pt", "p", "huggingface")]
    ):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", to]) == 0, number
    for folder in ("h", "p"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(found[name], each) for name, each in model.state_dict().items())
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "nested", no_dist=True)
    assert main(["convert", str(tmp_path / "nested"), str(tmp_path / "n")]) == 0
    assert set(load_file(tmp_path / "n/model.safetensors")) == set(model.state_dict())
    assert main(["convert", str(saved), str(tmp_path / "bf"), "--dtype", "bfloat16"]) == 0
    assert load_file(tmp_path / "bf/model.safetensors")["0.weight"].dtype == torch.bfloat16
    assert main(["convert", str(saved), str(tmp_path / "h")]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(saved), str(tmp_path / "x"), "--dtype", "int8"]) == 2


def test_prune_says_what_it_would_do(tmp_path, model, capsys):
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    for step in range(3):
        checkpoints.save(step, model=model)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert len(list(tmp_path.iterdir())) == 3
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000002"]
    assert "removed" in capsys.readouterr().out
    checkpoints.save(4, model=model)
    (tmp_path / "step-00000002" / "notes.txt").write_text("mine")
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert "step-00000002: " in (text := capsys.readouterr().out)
    assert "notes.txt" in text


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("par-checkpoint ls: there is no folder")


def test_a_config_reaches_the_folder(tmp_path, model):
    par_checkpoint.save(
        tmp_path / "c", model=model, format=par_checkpoint.Format(config={"model_type": "x", "width": 7})
    )
    assert json.loads((tmp_path / "c/config.json").read_text()) == {"model_type": "x", "width": 7}


def test_corrupt_bytes_are_neither_converted_nor_compared(saved, tmp_path, capsys):
    save(tmp_path / "good", model={"0.weight": torch.zeros(7, 5)})
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    for arguments in (["convert", str(saved), str(tmp_path / "new")], ["diff", str(tmp_path / "good"), str(saved)]):
        assert main(arguments) == 1
        assert "block 0 of" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_config_that_is_no_json_is_wrong(tmp_path, model, capsys):
    save(tmp_path / "c", model=model, format=Format(config={"width": 7}))
    assert main(["verify", str(tmp_path / "c")]) == 0
    (tmp_path / "c/config.json").write_text('{"width": ')
    assert main(["verify", str(tmp_path / "c")]) == 1
    assert "config.json" in capsys.readouterr().out


@pytest.mark.storm
def test_a_shell_runs_it_and_a_reader_that_leaves_early_is_no_error(saved):
    command = f"{sys.executable} -m par_checkpoint ls --tensors {saved} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_paths_that_are_there_and_paths_that_are_not_are_named(saved, tmp_path, capsys):
    assert main(["convert", str(saved), str(saved)]) == 1
    assert "exists; choose another path" in capsys.readouterr().err
    assert main(["prune", str(tmp_path / "nope")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_diff_compares_exactly(tmp_path, capsys):
    """Whole numbers that are one number as floats, imaginary parts, and dtypes that torch cannot compare."""
    pairs = {
        "int64": (torch.tensor([2**53]), torch.tensor([2**53 + 1])),
        "uint64": (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**63 + 1], dtype=torch.uint64)),
        "complex64": (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        "float8": (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn)),
        "bool": (torch.tensor([True]), torch.tensor([False])),
        "nan": (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
    }
    for number, name in enumerate(("a", "b")):
        save(tmp_path / name, model={dtype: pair[number] for dtype, pair in pairs.items()})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == {"int64", "uint64", "complex64", "float8", "bool"}
    assert last == "5 tensors differ"


def test_an_interrupt_is_one_line(saved, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("par_checkpoint.tools.cli.verify", interrupt)
    assert main(["verify", str(saved)]) == 130
    assert capsys.readouterr().err == "par-checkpoint verify: interrupted\n"


def test_a_pickle_is_opened_once_for_all_its_tensors(tmp_path, capsys, monkeypatch):
    (tmp_path / "bin").mkdir()
    torch.save({str(number): torch.ones(3) for number in range(20)}, tmp_path / "bin" / "pytorch_model.bin")
    opened, original = [], torch.load

    def counted(*args, **kwargs):
        opened.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", counted)
    assert main(["convert", str(tmp_path / "bin"), str(tmp_path / "a")]) == 0
    assert len(opened) == 2, "one look, and one for the tensors"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "bin")]) == 0
    assert len(opened) == 4


def test_a_file_whose_tensors_have_no_names_of_their_own_is_not_converted(tmp_path, capsys):
    weights = {"weight": torch.ones(2)}
    torch.save({"model_state_dict": weights, "optimizer_state_dict": {"state": {}}}, tmp_path / "tutorial.pt")
    assert main(["convert", str(tmp_path / "tutorial.pt"), str(tmp_path / "t")]) == 0
    assert list(load_file(tmp_path / "t" / "model.safetensors")) == ["weight"]
    for name, value, words in (
        ("list", {"layers": [torch.ones(2)], **weights}, "'layers' is a list with tensors in it"),
        ("twice", {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "two tensors would have the name 'a.b'"),
    ):
        torch.save(value, tmp_path / f"{name}.pt")
        assert main(["convert", str(tmp_path / f"{name}.pt"), str(tmp_path / name)]) == 1
        assert words in capsys.readouterr().err
