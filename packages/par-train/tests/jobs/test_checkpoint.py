import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import par_train
from par_checkpoint import Format
from par_precision import mixed
from par_train._errors import UserError
from par_train.jobs.byte_gpt import ByteGPT, fill_, kept_options, make_gpt
from par_train.jobs.checkpoint import Origin, TrainingState, check_resumes, find_state, load_state, write_checkpoint
from par_train.jobs.options import DataOptions, ModelOptions, Options, TrainOptions
from par_train.jobs.trainer import make_optimizer

OPTIONS = Options(model=ModelOptions(width=16, layers=1, heads=2, context=8), seed=5)


def trained():
    model = fill_(make_gpt(OPTIONS.model), 0)
    return mixed(model, make_optimizer(model, TrainOptions()), "fp32")


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained()
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = TrainingState(step=3, samples=12, seconds=1.5, text="digest", kept=kept_options(OPTIONS))
    with ByteGPT(OPTIONS).files(model) as files:
        parts = {"model": model, "optimizer": optimizer, "scheduler": optimizer.scaling}
        write_checkpoint(tmp_path / "checkpoint", state, **parts, format=Format(**files))
    return tmp_path / "checkpoint", model, optimizer, state


def test_load_model_of_a_checkpoint_returns_its_weights(saved):
    path, model, _, _ = saved
    loaded = par_train.load_model(path)
    assert loaded.length == OPTIONS.model.context
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_origin_load_restores_state_and_optimizer(saved):
    path, _, optimizer, _ = saved
    loaded = load_state(path)
    assert (loaded.step, loaded.samples, loaded.seconds, loaded.text) == (3, 12, 1.5, "digest")
    model, again = trained()
    origin = Origin(path=str(path), folder=str(path), state=loaded)
    origin.load(model=model, optimizer=again, scheduler=again.scaling)
    for number, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(again.state_dict()["state"][number][name], value)


def test_no_file_knows_the_number_of_ranks(saved):
    path, *_ = saved
    files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert files == [
        "config.json",
        "model.safetensors",
        "optimizer/optimizer-00001-of-00001.safetensors",
        "optimizer/optimizer.safetensors.index.json",
        "par_checkpoint.json",
    ]


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no checkpoint .*nothing"):
        par_train.load_model(tmp_path / "nothing")


def test_no_checkpoint_is_none_to_go_on_from(tmp_path):
    assert find_state(tmp_path / "nothing") is None


def test_another_format_is_refused(saved):
    path, *_ = saved
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this par-train reads 4"):
        par_train.load_model(path)


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (Options(model=ModelOptions(width=32, layers=1, heads=2, context=8), seed=5), "digest", "model.width 16"),
        (Options(model=OPTIONS.model, seed=6), "digest", "seed 5, but the config has 6"),
        (OPTIONS, "another", "the tokens of data.folder differ from"),
        (
            replace(OPTIONS, data=DataOptions(packing="whole")),
            "digest",
            "data.packing 'auto', but the config has 'whole'",
        ),
        (replace(OPTIONS, precision="bf16"), "digest", "precision 'fp32', but the config has 'bf16'"),
    ],
)
def test_check_resumes_of_another_run_raises(saved, options, text, message):
    path, *_ = saved
    origin, data = (
        Origin(path=str(path), folder=str(path), state=load_state(path)),
        SimpleNamespace(names=["data.folder"]),
    )
    for changes in ({}, {"precision": "bf16-amp"}):
        check_resumes(kept_options(replace(OPTIONS, **changes)), "", SimpleNamespace(digest="digest"), origin)
    data.digest = text
    with pytest.raises(UserError, match=f"{message}.* or start anew with --overwrite, and without --resume$"):
        check_resumes(kept_options(options), "", data, origin)


@pytest.mark.parametrize("data", [b"", b"no json", None])
def test_a_broken_training_state_is_named(saved, data):
    path, *_ = saved
    file = path / "par_checkpoint.json"
    file.write_bytes(data) if data is not None else file.unlink()
    with pytest.raises(UserError, match=r"is no checkpoint of a run: .* with --overwrite, and without --resume$"):
        find_state(path)
