import io
import math
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from par_data import FolderText
from par_groups import Topology
from par_train.jobs.byte_gpt import ByteGPT
from par_train.jobs.byte_rows import text_rows
from par_train.jobs.options import Options, TrainOptions
from par_train.jobs.report import print_banner, print_summary
from par_train.run.metrics import MetricsFile, read_metrics
from par_train.run.progress import Bar, Lines, make_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def metrics(step, validation_loss=None, skipped=None, rate=1234.0):
    return {
        "step": step,
        "loss": 2.5,
        "validation_loss": validation_loss,
        "learning_rate": 0.1,
        "tokens": 10 * step,
        "seconds": step,
        "tokens_per_second": rate,
        "gradient_norm": 1.0,
        "skipped": skipped,
    }


def test_a_file_gets_few_lines(capsys):
    progress = make_progress(100, 0)
    assert isinstance(progress, Lines)
    for step in range(1, 101):
        progress.show(metrics(step, 3.5 if step == 50 else None, skipped=step in {7, 9} or None, rate=10.0))
    progress.close()
    first, validation = capsys.readouterr().err.splitlines()
    assert first.startswith("step   1/100 00:01<01:39, loss 2.500 10.0 tokens/s ")
    assert validation.startswith("step  50/100 00:50<00:50, loss 2.500 val 3.500 10.0 tokens/s ")
    assert validation.endswith("iB 2 skipped")


def test_progress_line_without_a_loss_shows_the_reward(capsys):
    progress = Lines(10)
    progress.show({"step": 1, "seconds": 1.0, "reward": 0.25})
    assert capsys.readouterr().err.startswith("step  1/10 00:01<00:09, reward 0.250 ")


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    progress = make_progress(12000, 10000)
    assert isinstance(progress, Bar)
    progress.show(metrics(10001, 3.5))
    progress.show(metrics(10002, skipped=True))
    progress.close()
    last = terminal.getvalue().split("\r")[-1].rstrip("\n")
    assert last.startswith("10002/12000 ")
    assert " loss 2.500 val 3.500 1.23k tokens/s " in last
    assert last.endswith("iB 1 skipped")
    assert len(last) <= 80


def test_the_speed_is_that_of_recent_steps(capsys):
    progress = Lines(1000)
    progress.show(metrics(1, rate=100.0))
    progress.show(metrics(2, 3.0, rate=200.0))
    for step in range(3, 200):
        progress.show(metrics(step, rate=1000.0))
    progress.show(metrics(200, 3.0, rate=1000.0))
    speeds = [line.partition(" tokens/s")[0].split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert speeds == ["100", "110", "1.00k"]


def banner(capsys, parallel, world_size, step=0, folder="/texts", **changes):
    text = FolderText(folder=Path(folder), files=2261, train=bytes(35336), held_out=bytes(1859))
    schedule = SimpleNamespace(microbatches=4) if "pipeline" in parallel else None
    options, topology = Options(output="runs/x", **changes), Topology.from_config(parallel, world_size)
    trainer = SimpleNamespace(
        step=step,
        parameters=875264,
        recipe=ByteGPT(options),
        data=text_rows(options, text),
        strategy=SimpleNamespace(spent=None, schedule=schedule, device=torch.device("cpu")),
    )
    print_banner(options, topology, trainer)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, lines
    return lines


def test_the_banner_draws_the_axes_that_there_are(capsys):
    lines = banner(
        capsys, {"pipeline": 2, "tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 32, precision="bf16", zero=2
    )
    assert lines[0] == "32 ranks, the slowest axis first"
    words = [line.split()[0] for line in lines]
    assert words[1:7] == ["axis", "data", "pipeline", "depth", "row", "col"]
    assert "sequence" not in words
    assert "expert" not in words
    assert "precision  bf16, ZeRO stage 2" in lines
    assert "pipeline   1f1b, 4 microbatches" in lines
    assert "batch      32 windows of 128 bytes, 16 a replica" in lines


def test_the_banner_of_one_rank_has_no_table(capsys):
    lines = banner(capsys, {}, 1, step=7, folder="/long" * 30)
    assert lines[:2] == ["1 rank, the slowest axis first", "model      Byte-level GPT, 875,264 parameters"]
    assert any(line.startswith("data       ...") and line.endswith("/long/long") for line in lines)
    assert lines[-2:] == ["output     runs/x", "           resumes after step 7 of 800"]


def test_the_summary_says_what_came_out(capsys, tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for each in (metrics(1), metrics(2, 3.25), metrics(3, skipped=True)):
        file.append(each)
    file.close()
    options = Options(output=str(tmp_path), train=TrainOptions(steps=9))
    print_summary(options, read_metrics(tmp_path / "metrics.jsonl"), 3, signal.SIGTERM, math.log(256))
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "trained    3 steps in 00:03, 10.0 tokens/s all included",
        "loss       2.5000 at the last step; a guess has 5.5452",
        "held out   3.2500 at step 2",
        "skipped    1 steps, whose gradient was not finite",
        f"wrote {tmp_path}/checkpoints/step-00000003",
        f"wrote {tmp_path}/metrics.jsonl",
    ]
    assert shown.err == "par-train: SIGTERM: saved after step 3 of 9; go on with --resume auto\n"


def test_samples_are_shown_a_line_each_in_letters_that_the_terminal_has(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stderr", shown)
    progress = Lines(10)
    progress.show({**metrics(4, 3.5), "samples": [{"prompt": "a", "text": "b\nc \u00e9"}, {"prompt": "d", "text": ""}]})
    lines = shown.buffer.getvalue().decode().splitlines()
    assert " val 3.500 " in lines[0]
    assert lines[1:] == [r"    'a' -> 'b\nc \xe9'", "    'd' -> ''"]


def test_the_summary_of_a_run_that_took_no_step_is_short(capsys, tmp_path):
    print_summary(Options(output=str(tmp_path)), [], 0, 0, 1.0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", ["0", "200"])
def test_a_bar_shows_on_a_terminal_of_unknown_size(monkeypatch, columns):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    bar = Bar(100, 0)
    bar.show(metrics(1))
    bar.close()
    assert "/100" in terminal.getvalue()
