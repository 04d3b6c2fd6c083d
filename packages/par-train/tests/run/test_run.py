"""`Run` in loops of one's own: signals, resume, lock, retention, lines; and the example as its readers start it."""

import io
import json
import math
import os
import shutil
import signal
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import Tiers, inspect
from par_groups import STOP_SIGNALS
from par_train import CheckpointPolicy, LoggingPolicy, Run, Strategy
from par_train.run import hooks as hooks_module
from par_train.run import trackers as trackers_module
from par_train.run.files import RunFiles
from par_train.run.lock import lock_folder
from par_train.run.log import Records

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
QUIET = LoggingPolicy(every=1, progress=False)
TOLERANCE = 1e-5  # relative, fp32: sums over ranks in another order


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    return sorted(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").iterdir())


class Loop:
    """A model, and a loop over it, as a user writes it."""

    def __init__(self, dropout=0.1, **options):
        self.strategy = Strategy(**options)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Dropout(dropout), nn.Linear(9, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(24, 6, generator=generator)
        loader = DataLoader(TensorDataset(inputs, inputs[:, :2] ** 2), batch_size=8, shuffle=True)  # epochs of 3 steps
        self.model, self.optimizer, self.loader = self.strategy.initialize(model, optimizer, loader)

    def train(self, folder, until, after_step=lambda run: None, *, draws=False, **keywords):
        """Trains in a run, and gives it when it has ended; without the picture, which takes longer than the steps."""
        with pytest.MonkeyPatch.context() as patch:
            if not draws:
                patch.setattr(hooks_module, "draw_loss", lambda *_: None)
            return self._train(folder, until, after_step, **keywords)

    def _train(self, folder, until, after_step, **keywords):
        with Run(folder, self.strategy, **{"logging": QUIET, **keywords}) as run:
            for batch in run.steps(self.loader, until):
                loss = self.strategy.execute_pipeline(
                    iter([batch]), self.model, functional.mse_loss, self.optimizer, return_loss=True
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
                run.log(loss=loss, samples=len(batch[0]))
                after_step(run)
        return run


def at(step, act):
    """Acts in the body of that step, on rank 1 alone."""
    return lambda run: act(run) if run.step + 1 == step and dist.get_rank() == 1 else None


def losses_of(folder):
    return [line["loss"] for line in lines_of(folder)]


@pytest.mark.ranks(2)
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_as_if_nothing_had_been(tmp_path):
    """Dropout and the order of data included; handlers are put back."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever starts the tests may ignore it, as nohup does
    Loop(zero=1).train(tmp_path / "whole", 9)
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    for number, code in (*((each, 0) for each in STOP_SIGNALS if each != signal.SIGINT), (signal.SIGINT, 130)):
        folder = tmp_path / number.name
        run = Loop(zero=1).train(folder, 9, at(4, lambda _, number=number: os.kill(os.getpid(), number)))
        assert (run.step, run.ended_by, run.exit_code) == (4, number, code)
        assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
        dist.barrier()
        assert steps_of(folder) == [4]
    again = Loop(zero=1).train(folder, 9, resume="auto", draws=True)  # which knows of no signal
    assert (again.step, again.ended_by, again.exit_code) == (9, 0, 0)
    dist.barrier()
    assert losses_of(folder) == losses_of(tmp_path / "whole")
    assert [line["samples"] for line in lines_of(folder)] == [8 * step for step in range(1, 10)]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ranks(1)
def test_who_ignores_hang_ups_as_under_nohup_trains_on(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = Loop().train(tmp_path, 3, lambda _: os.kill(os.getpid(), signal.SIGHUP))
    assert (run.step, run.ended_by) == (3, 0)


@pytest.mark.ranks(2)
def test_a_run_goes_on_under_another_topology(tmp_path):
    Loop(dropout=0.0).train(tmp_path / "whole", 8)
    topologies = [{"zero": 3}, {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}}]
    for number, topology in enumerate(topologies):
        folder = tmp_path / str(number)
        Loop(dropout=0.0, **topology).train(folder, 8, at(5, lambda run: run.leave()))
        Loop(dropout=0.0, **topologies[number - 1]).train(folder, 8, resume="auto")
        dist.barrier()
        assert losses_of(folder) == pytest.approx(losses_of(tmp_path / "whole"), rel=TOLERANCE)


@pytest.mark.ranks(2)
def test_checkpoints_come_when_they_are_due_and_old_ones_go(tmp_path):
    for async_ in (False, True):
        folder = tmp_path / str(async_)
        checkpoint = CheckpointPolicy(every=3, keep_last=2, async_=async_)
        Loop().train(folder, 11, checkpoint=checkpoint, logging=LoggingPolicy(every=4, progress=False))
        dist.barrier()
        assert steps_of(folder) == [9, 11]
        # Every fourth step, and where a checkpoint is, so that counts go on from there.
        assert [line["step"] for line in lines_of(folder)] == [3, 4, 6, 8, 9, 11]
        assert [line["samples"] for line in lines_of(folder)] == [8 * step for step in (3, 4, 6, 8, 9, 11)]


@pytest.mark.ranks(2)
def test_a_run_saves_to_memory_goes_on_from_the_nearest_tier_and_ends_when_the_last_one_has_everything(tmp_path):
    folder, near, far = (tmp_path / name for name in ("run", "near", "far"))
    tiers = CheckpointPolicy(tiers=Tiers([near, far]), every=3, keep_last=[1, 2])
    Loop(zero=1).train(tmp_path / "whole", 9)
    Loop(zero=1).train(folder, 9, at(7, lambda run: run.leave()), checkpoint=replace(tiers, async_=True))
    dist.barrier()
    assert [steps_of(tier) for tier in (near, far)] == [[7], [6, 7]]
    assert not (folder / "checkpoints").exists()
    for gone in ("near", "far"):
        case = tmp_path / f"without-{gone}"
        if dist.get_rank() == 0:
            for name in {"run", "near", "far"} - {gone}:
                shutil.copytree(tmp_path / name, case / name)
        dist.barrier()
        said, found = io.StringIO(), case / ("far" if gone == "near" else "near")
        with redirect_stderr(said):
            moved = replace(tiers, tiers=Tiers([case / "near", case / "far"]))
            Loop(zero=1).train(case / "run", 9, resume="auto", checkpoint=moved)
        if dist.get_rank() == 0:
            assert f"resumes after step 7, from {found}/checkpoints/step-00000007\n" in said.getvalue()
        dist.barrier()
        assert losses_of(case / "run") == losses_of(tmp_path / "whole")
        assert [steps_of(case / tier)[-1] for tier in ("near", "far")] == [9, 9]
    with pytest.raises(ValueError, match="holds a run already, of step 7; pass resume='auto' to continue it"):
        Loop().train(tmp_path / "other", 2, checkpoint=tiers)
    copied = CheckpointPolicy(tiers=Tiers([near, far], copies=2))
    with pytest.raises(ValueError, match="copies is 2, but the ranks are on 1 host"):
        Loop().train(tmp_path / "other", 2, checkpoint=copied, overwrite=True)
    Loop().train(tmp_path / "other", 2, overwrite=True, checkpoint=tiers)
    dist.barrier()
    assert [steps_of(tier) for tier in (near, far)] == [[2], [2]]


@pytest.mark.ranks(2)
def test_a_run_may_end_early_by_itself_and_train_on_in_the_same_process(tmp_path):
    loop = Loop()
    run = loop.train(tmp_path, 9, at(3, lambda run: run.leave()))
    assert (run.step, run.ended_by, run.exit_code) == (3, 0, 0)
    with Run(tmp_path, loop.strategy, resume="auto", logging=QUIET) as run:
        for until in (5, 7):  # a loop may be followed by another one
            for _ in run.steps(loop.loader, until):
                run.log(loss=0.5)
    dist.barrier()
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 8))
    assert steps_of(tmp_path) == [3, 5, 7]


@pytest.fixture
def taken(tmp_path):
    """A folder that another process, pytest, has locked."""
    files = RunFiles(tmp_path / "taken")
    with lock_folder(files):
        yield tmp_path


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused_in_words_on_every_rank(taken):
    loop, folder = Loop(), taken / "run"

    def refused(words, folder=folder, until=2, **keywords):
        with pytest.raises(ValueError, match=words):
            loop.train(folder, until, **keywords)
        dist.barrier()

    for words, checkpoint in (
        ("checkpoint.every=0: it must be a whole number from 1 on, or None", CheckpointPolicy(every=0)),
        ("checkpoint.keep_last=0: it must be a whole number from 1 on, or None", CheckpointPolicy(keep_last=0)),
        ("checkpoint.keep_last='3': it must be a whole number", CheckpointPolicy(keep_last="3")),
        ("checkpoint.format='fast': it must be a par_checkpoint.Format, or None", CheckpointPolicy(format="fast")),
        (r"checkpoint.tiers=\['a'\]: it must be a par_checkpoint.Tiers, or None", CheckpointPolicy(tiers=["a"])),
    ):
        refused(words, checkpoint=checkpoint)
    for every in (2.5, -1):
        refused(f"logging.every={every}: it must be a whole number from 1 on", logging=LoggingPolicy(every=every))
    refused("resume='auto' continues a run and overwrite=True replaces it", resume="auto", overwrite=True)
    refused("until=0: it is the step at which training ends; pass 1 or more", until=0)
    refused(
        r"taken' is being written by another run \(process \d+ on .+\); name another folder, or wait", taken / "taken"
    )
    nothing = "resume='.*nothing': it holds no complete checkpoint; pass the folder of a run"
    refused(nothing, resume=taken / "nothing")
    refused("resume='.*step-00000007': it holds no complete", resume=taken / "run" / "checkpoints" / "step-00000007")
    refused("rank 1 has other options of a Run than rank 0", logging=LoggingPolicy(every=1 + dist.get_rank()))
    assert not (folder / "metrics.jsonl").exists()

    loop.train(folder, 2)
    refused(r"run' has a run already \(checkpoints\); pass resume='auto' to continue it", folder)
    other = taken / "other"
    Loop().train(other, 3, checkpoint=CheckpointPolicy(every=1))
    refused(r"other' has a run already", other, resume=folder)
    refused(
        "has a checkpoint of step 3, later than step 2 of resume", other, resume=other / "checkpoints" / "step-00000002"
    )
    if dist.get_rank() == 0:  # what several models would have saved
        (other / "checkpoints" / "0").mkdir()
        for path in (other / "checkpoints").glob("step-*"):
            path.rename(path.parent / "0" / path.name)
    dist.barrier()
    refused("has a checkpoint .checkpoints/0/step-00000001. that this run cannot resume from", other, resume="auto")
    assert len(losses_of(other)) == 3


@pytest.mark.ranks(2)
def test_run_at_its_last_step_says_how_to_train_on(tmp_path):
    Loop().train(tmp_path, 2)
    said = io.StringIO()
    with redirect_stderr(said):
        assert Loop().train(tmp_path, 2, resume="auto").step == 2
    if dist.get_rank() == 0:
        assert "is at step 2 of 2 already, so no step is taken; raise until to train on" in said.getvalue()


@pytest.mark.ranks(2)
def test_another_runs_checkpoints_may_be_gone_on_from_and_a_run_replaced(tmp_path):
    Loop().train(tmp_path / "first", 6, checkpoint=CheckpointPolicy(every=2))
    ways = {"run": tmp_path / "first", "root": tmp_path / "first" / "checkpoints"}
    for name, resume in ways.items():
        assert Loop().train(tmp_path / name, 7, resume=resume).step == 7
        dist.barrier()
        assert [line["step"] for line in lines_of(tmp_path / name)] == [7]
    Loop().train(tmp_path / "step", 6, resume=tmp_path / "first" / "checkpoints" / "step-00000004")
    dist.barrier()
    assert losses_of(tmp_path / "step") == losses_of(tmp_path / "first")[4:]
    (tmp_path / "first" / "notes.txt").touch()
    Loop().train(tmp_path / "first", 1, overwrite=True)
    dist.barrier()
    assert [line["step"] for line in lines_of(tmp_path / "first")] == [1]
    assert steps_of(tmp_path / "first") == [1]
    assert (tmp_path / "first" / "notes.txt").exists()


@pytest.mark.ranks(2)
def test_ranks_that_torchrun_starts_again_go_on(tmp_path):
    os.environ["TORCHELASTIC_RUN_ID"] = "mine"
    with pytest.raises(RuntimeError, match="the fault"):
        Loop().train(tmp_path, 5, at_every_rank(4, fail), checkpoint=CheckpointPolicy(every=3))
    dist.barrier()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert Loop().train(tmp_path, 5, checkpoint=CheckpointPolicy(every=3)).step == 5
    dist.barrier()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5]
    os.environ["TORCHELASTIC_RUN_ID"] = "another"
    with pytest.raises(ValueError, match="has a run already"):
        Loop().train(tmp_path, 5)


def at_every_rank(step, act):
    return lambda run: act() if run.step + 1 == step else None


def fail():
    raise RuntimeError("the fault of the test")


@pytest.mark.ranks(2)
def test_a_signal_before_the_first_step_changes_nothing(tmp_path):
    Loop().train(tmp_path, 2)
    dist.barrier()
    before = losses_of(tmp_path)
    loop = Loop()
    with Run(tmp_path, loop.strategy, overwrite=True, logging=LoggingPolicy(progress=False)) as run:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert list(run.steps(loop.loader, 5)) == []
    assert (run.step, run.ended_by, run.exit_code) == (0, signal.SIGTERM, 143)
    dist.barrier()
    assert losses_of(tmp_path) == before
    assert steps_of(tmp_path) == [2]


class NoCopyToHost(TorchDispatchMode):
    """Refuses what waits for a device: reading a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Tracker:
    def __init__(self, fails_at=None):
        self.lines, self.fails_at = [], fails_at

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("the service is gone")
        self.lines.append((step, values))


@pytest.mark.ranks(2)
def test_lines_have_means_and_counts_of_all_data_ranks_and_go_to_trackers(tmp_path):
    loop, rank = Loop(), dist.get_rank()
    good, bad = Tracker(), Tracker(fails_at=4)
    said = io.StringIO()
    with (
        redirect_stderr(said),
        Run(tmp_path, loop.strategy, logging=LoggingPolicy(every=2, trackers=[bad, good], progress=False)) as run,
    ):
        for _ in run.steps([0, 1], until=5):
            with NoCopyToHost():
                run.log(loss=torch.tensor(2.0 * run.step + rank), half=0.5, tokens=10 * (1 + rank))
                run.log(rows=torch.tensor([3]))
            for values, words in (({"step": 1}, "every line has"), ({"loss": torch.ones(2)}, r"shape \(2,\)")):
                with pytest.raises(ValueError, match=words):
                    run.log(**values)
            with pytest.raises(TypeError, match="loss as a str; give a number"):
                run.log(loss="low")
    dist.barrier()
    exact = [{name: line[name] for name in ("step", "loss", "half", "tokens", "rows")} for line in lines_of(tmp_path)]
    assert exact == [
        {"step": 2, "loss": 1.5, "half": 0.5, "tokens": 60, "rows": 12},
        {"step": 4, "loss": 5.5, "half": 0.5, "tokens": 120, "rows": 24},
        {"step": 5, "loss": 8.5, "half": 0.5, "tokens": 150, "rows": 30},
    ]
    assert all(line["tokens_per_second"] > 0 and line["seconds"] >= 0 for line in lines_of(tmp_path))
    if rank == 0:
        assert [step for step, _ in good.lines] == [2, 4, 5]
        assert [step for step, _ in bad.lines] == [2]
        assert good.lines[0][1]["loss"] == 1.5
        assert said.getvalue().count("Tracker.log() failed at step 4 and gets no more lines") == 1
    else:
        assert (good.lines, bad.lines) == ([], [])


class Failing:
    """A tracker by name that cannot begin, as without a key."""

    def __init__(self, beginning):
        raise ConnectionError("no key")


@pytest.mark.ranks(2)
def test_run_tracker_that_cannot_begin_raises_on_every_rank(tmp_path, monkeypatch):
    loop = Loop()
    loop.train(tmp_path, until=1)
    monkeypatch.setitem(trackers_module._KNOWN, "wandb", (("json",), Failing))
    with pytest.raises((ConnectionError, ValueError), match="no key"):
        Loop().train(tmp_path, until=2, overwrite=True, logging=LoggingPolicy(trackers=["wandb"]))
    dist.barrier()
    assert steps_of(tmp_path) == [1]  # the run that was to be replaced is still there
    assert len(lines_of(tmp_path)) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", [2, 4], ids=["between", "last"])
def test_run_records_that_cannot_be_written_raise_on_every_rank(tmp_path, monkeypatch, step):
    def write(records, line):
        if line["step"] == step:
            raise OSError("no space left")

    monkeypatch.setattr(Records, "write", write)
    with pytest.raises((OSError, ValueError), match="no space left"):
        Loop().train(tmp_path, until=4)


@pytest.mark.ranks(2)
def test_run_picture_that_cannot_be_drawn_raises_on_every_rank(tmp_path, monkeypatch):
    def draw(*_):
        raise OSError("no space left")

    monkeypatch.setattr(hooks_module, "draw_load", draw)
    with pytest.raises((OSError, ValueError), match="no space left"):
        Loop().train(tmp_path, until=1)
    dist.barrier()
    assert steps_of(tmp_path) == [1]


@pytest.mark.ranks(1)
def test_batches_that_end_before_the_run_are_named(tmp_path):
    loop = Loop()
    before = signal.getsignal(signal.SIGTERM)

    def train():
        with Run(tmp_path, loop.strategy, logging=LoggingPolicy(progress=False)) as run:
            for _ in run.steps(iter(range(3)), until=9):
                run.log(loss=math.nan)

    with pytest.raises(ValueError, match="there is no batch for step 4 of 9; pass something that has batches"):
        train()
    assert signal.getsignal(signal.SIGTERM) == before
    with Run(tmp_path, loop.strategy, resume="auto", logging=LoggingPolicy(progress=False)):  # the lock was let go
        pass


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(warm_python, tmp_path):
    """Starts the example with one rank, or with two by torchrun."""

    def start_example(folder, *arguments, ranks=2):
        words = [*(TORCHRUN if ranks > 1 else []), str(EXAMPLE), str(folder), "--log-every=1", *arguments]
        return warm_python.start(words, folder=tmp_path, environment=ENVIRONMENT, ranks=ranks if ranks > 1 else 0)

    return start_example


def finish(process):
    try:
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()  # its ranks follow it
    assert "own_loop.py" not in err, err  # in no traceback, and in no report of torchrun's
    return process.returncode, err


def wait_for_steps(folder, count):
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{metrics} did not reach {count} steps"
        time.sleep(0.02)


ENDLESS = "--steps=1000000"  # only a signal ends it


def test_the_example_leaves_on_signals_and_goes_on_with_one_rank(tmp_path, start):
    folder = tmp_path / "run"
    process = start(folder, ENDLESS, "--zero=1")
    wait_for_steps(folder, 3)
    second = start(folder, ranks=1)
    _, err = second.communicate(timeout=240)
    assert second.returncode == 1
    assert "is being written by another run (process " in err
    process.send_signal(signal.SIGTERM)  # torchrun hands it on
    _, err = finish(process)
    step = lines_of(folder)[-1]["step"]
    assert f"par-train: SIGTERM: saved after step {step} of 1000000; resume='auto' goes on" in err
    assert steps_of(folder)[-1] == step
    code, err = finish(start(folder, f"--steps={step + 5}", ranks=1))
    assert code == 0, err
    assert f"par-train: resumes after step {step}" in err
    assert [line["step"] for line in lines_of(folder)] == list(range(1, step + 6))
    assert inspect(folder / "checkpoints" / f"step-{step + 5:08d}").step == step + 5
    one = start(folder, ENDLESS, ranks=1)
    wait_for_steps(folder, step + 8)
    one.send_signal(signal.SIGINT)
    assert finish(one)[0] == 130


def test_the_ranks_of_a_killed_torchrun_save_and_leave(tmp_path, start, ranks_of):
    process = start(tmp_path, ENDLESS)
    wait_for_steps(tmp_path, 3)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    deadline = time.monotonic() + 240
    try:
        while ranks_of(process.pid):
            assert time.monotonic() < deadline, "the ranks did not leave"
            time.sleep(0.02)
    finally:
        for each in ranks_of(process.pid):
            os.kill(each, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    step = lines_of(tmp_path)[-1]["step"]
    assert f"SIGTERM: saved after step {step}" in err, err
    assert steps_of(tmp_path)[-1] == step
