"""A job that resumes: what its checkpoint holds, and what may not differ."""

import json
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import par_train
from par_train import Strategy
from par_train._errors import UserError
from par_train.jobs import hooks
from par_train.jobs.job_run import train
from par_train.jobs.options import CheckpointOptions, DataOptions, ModelOptions, Options, TrainOptions
from par_train.run.stop import Stop


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "draw_loss", lambda *_, **__: None)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("all the words that there are " * 40)
    return Options(
        model=ModelOptions(width=16, layers=1, heads=2, context=8),
        train=TrainOptions(steps=3, batch_size=4, checkpoint_every=1),
        data=DataOptions(folder=str(tmp_path / "text")),
        output=str(tmp_path / "out"),
        device="cpu",
        seed=5,
    )


def digest_of(model):
    with Strategy(device="cpu", numerics="canonical", lanes=2) as strategy:
        model, _ = strategy.initialize(model, torch.optim.SGD(model.parameters()))
        return str(strategy.digest(model))


def checkpoints_of(options):
    return sorted(options.files.checkpoints.iterdir())


def test_checkpoint_is_a_model_with_the_options_that_made_it(options):
    kept = replace(options, checkpoint=CheckpointOptions(keep_last=(2,)))
    assert train(kept, Stop()) == 0
    assert [path.name for path in checkpoints_of(kept)] == ["step-00000002", "step-00000003"]
    path = checkpoints_of(kept)[-1]
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == [
        "config.json",
        "model.safetensors",
        "optimizer/optimizer-00001-of-00001.safetensors",
        "optimizer/optimizer.safetensors.index.json",
        "par_checkpoint.json",
        "par_checkpoint.safetensors",
    ]
    model = par_train.load_model(path)
    assert model.length == options.model.context
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this par-train reads 4"):
        par_train.load_model(path)
    with pytest.raises(ValueError, match=r"there is no checkpoint .*nothing"):
        par_train.load_model(path / "nothing")


def test_resume_of_another_run_raises(options, tmp_path):
    assert train(options, Stop()) == 0
    again = replace(options, resume="auto")
    assert train(replace(again, precision="bf16-amp"), Stop()) == 0  # the weights have the same dtype
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "words.txt").write_text("quite other words than these " * 40)
    for message, other in (
        ("model.width 16", replace(again, model=replace(options.model, width=32))),
        ("seed 5, but the config has 6", replace(again, seed=6)),
        (
            "the tokens of data.folder differ from",
            replace(again, data=replace(options.data, folder=str(tmp_path / "other"))),
        ),
        (
            "data.packing 'auto', but the config has 'whole'",
            replace(again, data=replace(options.data, packing="whole")),
        ),
        ("precision 'fp32', but the config has 'bf16'", replace(again, precision="bf16")),
    ):
        with pytest.raises(UserError, match=f"{message}.* or start anew with --overwrite, and without --resume$"):
            train(other, Stop())
    with pytest.raises(UserError, match=r"train\.batch_size 5: "):
        train(replace(again, train=replace(options.train, batch_size=5)), Stop())
    assert [path.name for path in checkpoints_of(options)] == ["step-00000003"]


def test_resume_of_a_damaged_checkpoint_raises(options):
    assert train(options, Stop()) == 0
    (path,) = checkpoints_of(options)
    again = replace(options, resume="auto")
    (path / "par_checkpoint.json").write_text("no json")
    with pytest.raises(UserError, match=r"step-00000003\) that this run cannot resume from: it is damaged, or"):
        train(again, Stop())
    shutil.rmtree(path)
    assert train(again, Stop()) == 0


def test_canonical_job_prints_the_digest_of_the_weights_of_each_checkpoint(options, capfd):
    model = ModelOptions(width=64, layers=1, heads=2, context=16)
    chosen = replace(options, model=model, numerics="canonical", lanes=2)
    chosen = replace(chosen, checkpoint=CheckpointOptions(keep_last=(3,)))
    assert train(chosen, Stop()) == 0
    printed = dict(re.findall(r"step (\d) has digest (\w+)", capfd.readouterr().out))
    stored = {str(path)[-1]: digest_of(par_train.load_model(path)) for path in checkpoints_of(chosen)}
    assert printed == stored
    assert len(set(stored.values())) == 3
    # A run that goes on from the middle has the same digest at its end.
    shutil.rmtree(checkpoints_of(chosen)[-1])
    assert train(replace(chosen, resume="auto"), Stop()) == 0
    assert f"step 3 has digest {printed['3']}" in capfd.readouterr().out


def test_resume_of_a_checkpoint_without_notes_raises():
    """A `Run` of a program has written it."""
    trainer = SimpleNamespace(options=Options(), recipe=SimpleNamespace(source_digest=""))
    with pytest.raises(UserError, match="'a/step-1' is no checkpoint of par-train run; start anew with --overwrite"):
        hooks.JobHooks(trainer, None).check({"notes": {}}, "a/step-1")


@pytest.mark.ranks(2)
def test_resume_from_a_folder_of_one_host_raises_on_every_rank(options, tmp_path):
    os.chdir(tmp_path)
    chosen = replace(options, output="out")
    assert train(chosen, Stop()) == 0
    dist.barrier()
    if dist.get_rank() == 1:  # as on a host with a disk of its own
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"ranks \[1\] do not find 'out/checkpoints', from which rank 0 resumes after"):
        train(replace(chosen, resume="auto"), Stop())
