"""Whole runs whose checkpoints go to memory first, and from there to slower tiers."""

import json
import os
import shutil
import signal
import socket
from dataclasses import replace

import pytest
import torch.distributed as dist

from par_checkpoint import inspect, verify
from par_train.jobs.job_run import train
from par_train.jobs.options import CheckpointOptions, DataOptions, ModelOptions, Options, TrainOptions
from par_train.run.stop import Stop

EXACT = ("step", "loss", "validation_loss", "learning_rate", "tokens", "gradient_norm")


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line.get(key) for key in EXACT} for line in lines]


def steps_in(tier):
    return sorted(path.name for path in (tier / "checkpoints").iterdir())


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.storm
def test_a_run_killed_before_the_disk_has_what_memory_has_goes_on_from_memory_and_then_from_the_disk(command, ranks_of):
    folder, flags = command.folder, ["--checkpoint.tiers=memory,disk", "--train.checkpoint_every=4"]
    plain = command.finish(command.train("no-tiers", "--train.checkpoint_every=4"))
    assert plain.returncode == 0, plain.stderr
    process = command.train("tiers", *flags, TEST_HOLD="6", TEST_HOLD_COPY="never")
    command.wait_for_steps("tiers", 6)
    for rank in ranks_of(process.pid):
        os.kill(rank, signal.SIGKILL)
    assert command.finish(process).returncode == 1
    assert steps_in(folder / "memory") == ["step-00000004"]
    assert not (folder / "disk" / "checkpoints" / "step-00000004").exists()

    again = command.finish(command.train("tiers", *flags, "--resume=auto"))
    assert again.returncode == 0, again.stderr
    assert "saves      first to memory\n           then to disk\n" in again.stdout
    assert f"resumes after step 4, from {folder}/memory/checkpoints/step-00000004" in again.stderr
    assert "resumes after step 4 of 12" in again.stdout
    assert "wrote disk/checkpoints/step-00000012" in again.stdout
    assert lines_of(folder / "tiers") == lines_of(folder / "no-tiers")
    for tier in ("memory", "disk"):
        assert steps_in(folder / tier) == ["step-00000012"]
        step = folder / tier / "checkpoints" / "step-00000012"
        assert verify(step) == []
        assert weights(step) == weights(folder / "no-tiers" / "checkpoints" / "step-00000012")

    shutil.rmtree(folder / "memory")
    more = command.finish(command.train("tiers", *flags, "--resume=auto", "--train.steps=13", "--ranks=2"))
    assert more.returncode == 0, more.stderr
    assert f"resumes after step 12, from {folder}/disk/checkpoints/step-00000012" in more.stderr
    assert [steps_in(folder / tier) for tier in ("memory", "disk")] == [["step-00000013"]] * 2

    for output, others, words in (
        (
            "tiers",
            ["--resume=auto"],
            "the checkpoints of the run in 'tiers' are in memory, disk; pass them as --check",
        ),
        ("another", flags, "holds a run already, of step 13; pass --resume auto to continue it, --overwrite to "),
    ):
        refused = command.finish(command.train(output, *others))
        assert refused.returncode == 2
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
    anew = command.finish(command.train("another", *flags, "--overwrite", "--train.steps=2"))
    assert anew.returncode == 0, anew.stderr
    assert [steps_in(folder / tier) for tier in ("memory", "disk")] == [["step-00000002"]] * 2


def test_a_signal_saves_to_memory_and_waits_for_the_last_tier_which_may_be_the_output_folder(command):
    go = command.folder / "go-copy"
    process = command.train("warned", "--checkpoint.tiers=quick,warned", TEST_HOLD="3", TEST_HOLD_COPY=str(go))
    command.wait_for_steps("warned", 3)
    process.send_signal(signal.SIGTERM)
    done = command.finish(process)
    assert done.returncode == 0, done.stderr
    near, last = (command.folder / tier / "checkpoints" / "step-00000004" for tier in ("quick", "warned"))
    assert f"par-train: {near} is there; waits until it is in {last}, too\n" in done.stderr
    assert "SIGTERM: saved after step 4 of 12" in done.stderr
    assert inspect(last).step == 4


@pytest.mark.ranks(2)
def test_a_host_that_lost_its_memory_goes_on_from_its_neighbours(tmp_path, monkeypatch):
    rank = dist.get_rank()
    monkeypatch.setattr(socket, "gethostname", lambda: f"host{rank}")
    text, memory, disk = tmp_path / str(rank), tmp_path / f"memory{rank}", tmp_path / "disk"
    text.mkdir()
    (text / "words.txt").write_text("all the words that there are " * 40)
    options = Options(
        device="cpu",
        data=DataOptions(folder=str(text)),
        model=ModelOptions(width=8, layers=1, heads=2, context=8),
        train=TrainOptions(steps=6, batch_size=4, warmup_steps=1, checkpoint_every=4),
        checkpoint=CheckpointOptions(tiers=(str(memory), str(disk)), copies=2, keep_last=(2,)),
        output=str(tmp_path / "out"),
    )
    train(options, Stop())
    whole = lines_of(tmp_path / "out")
    for tier in (memory, disk):
        assert steps_in(tier) == ["step-00000004", "step-00000006"]
    saved = weights(disk / "checkpoints" / "step-00000006")
    dist.barrier()
    shutil.rmtree(memory / "checkpoints" / "step-00000006")
    if rank == 1:
        shutil.rmtree(memory)
        disk.rename(tmp_path / "away")
    dist.barrier()
    train(replace(options, resume="auto"), Stop())
    assert lines_of(tmp_path / "out") == whole
    assert weights(disk / "checkpoints" / "step-00000006") == saved
    assert steps_in(memory)[-1] == "step-00000006"
