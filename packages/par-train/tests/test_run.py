"""Whole runs: what they leave, how they go on, and how they end.

Over three ranks: a sum of two is the same in every order, and an even split of the work says little.
"""

import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import par_train
from par_checkpoint import inspect, verify

LOSS_TOLERANCE = 1e-5  # relative; float32 sums of 96 losses, and of gradients, in another order


def read_lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest(folder):
    """The newest checkpoint of a run."""
    return max(path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))


def weights(folder):
    return (newest(folder) / "model.safetensors").read_bytes()


def assert_no_ranks(ranks_of, launcher, within=0.0):
    deadline = time.monotonic() + within
    while ranks_of(launcher) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks_of(launcher) == []


@pytest.fixture(scope="module")
def reference(command):
    """A run that nobody interrupted."""
    done = command.finish(command.train("reference", TEST_PICTURES="1"))
    assert done.returncode == 0, done.stderr
    return command.folder / "reference", done


@pytest.mark.storm
def test_a_budget_changes_no_weight_and_its_reasons_are_said_before_and_after_the_first_step(command, reference):
    room = ["--memory.device=400kB", "--memory.host=30kB", "--memory.disk=1MB", f"--memory.path={command.folder}"]
    done = command.finish(command.train("tight", *room))
    assert done.returncode == 0, done.stderr
    assert weights(command.folder / "tight") == weights(reference[0])
    told = done.stdout
    assert told.index("in the first step, layers save only their inputs") < told.index("activations: layers save all")
    assert re.search(r"opt [0-9]+% host, [0-9]+% disk", told)
    assert re.search("returns? to memory", told)
    short = command.finish(command.train("short", "--memory.device=1kB"))
    assert short.returncode == 2
    assert "the budget of the device is 1.0 kB, and " in short.stderr


def test_files_and_words(reference):
    folder, done = reference
    lines = read_lines(folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 9, 12]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["tokens"] == 12 * 6 * 16
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    files = [".par-train.lock", "checkpoints", "loss.png", "metrics.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == files
    for word in (
        "3 ranks",
        "parameters",
        "held out",
        "wrote reference/checkpoints/step-00000012",
        "wrote reference/loss.png",
    ):
        assert word in done.stdout
    assert "step 12/12" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.storm  # test_output has its streams, run/test_run what ignores hang-ups
def test_a_run_without_standard_streams_that_ignores_hang_ups_trains_all_the_same(new_command, ranks_of):
    """As with `nohup` and `<&- >&- 2>&-`, where files would get the numbers of the streams."""
    again = "os.execv(sys.executable, [sys.executable, '-m', 'par_train', *sys.argv[1:]])"
    code = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.closerange(0, 3); {again}"
    go = new_command.folder / "streamless-go"
    process = new_command.train_after(
        code, "streamless", "--train.steps=4", "--ranks=1", TEST_HOLD="2", TEST_GO=str(go)
    )
    new_command.wait_for_steps("streamless", 2)
    for each in (process.pid, *ranks_of(process.pid)):
        os.kill(each, signal.SIGHUP)
    go.touch()
    assert new_command.finish(process).returncode == 0
    assert [line["step"] for line in read_lines(new_command.folder / "streamless")] == [1, 2, 3, 4]
    assert verify(newest(new_command.folder / "streamless")) == []


def test_the_checkpoint_is_a_model(reference):
    folder, _ = reference
    model = par_train.load_model(newest(folder))
    assert model(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 256)


def stop(command, name, number, *arguments):
    """Starts a run, sends its launcher a signal in the fourth step, and waits for its end."""
    process = command.train(name, *arguments, TEST_HOLD="3")
    command.wait_for_steps(name, 3)
    process.send_signal(number)
    done = command.finish(process)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(f"par-train: {number.name}: saved after step") == 1, done.stderr
    assert len(read_lines(command.folder / name)) == 4
    return process, done


def test_sigterm_saves_and_resume_is_exact(command, reference, ranks_of):
    process, done = stop(command, "terminated", signal.SIGTERM)
    assert done.returncode == 0
    assert_no_ranks(ranks_of, process.pid)
    folder = command.folder / "terminated"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "loss": 1.0}\n')  # after the checkpoint: to be forgotten
    again = command.finish(command.train("terminated", "--resume=auto"))
    assert again.returncode == 0, again.stderr
    assert "resumes after step 4" in again.stdout
    assert weights(folder) == weights(reference[0])
    exact = ("step", "loss", "validation_loss", "learning_rate", "tokens", "gradient_norm")
    expected = [{key: line.get(key) for key in exact} for line in read_lines(reference[0])]
    assert [{key: line.get(key) for key in exact} for line in read_lines(folder)] == expected


def assert_ended_by_sigkill(done, rank):
    """One of the others says that it lost a connection, the launcher says why."""
    words = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert len(words) == 2, done.stderr
    assert re.fullmatch(r"par-train: rank \d lost its connection to another rank", words[0])
    assert words[1] == f"par-train: rank {rank} was ended by SIGKILL"


def test_a_killed_rank_is_named(command):
    done = command.finish(command.train("headless", TEST_KILLED_RANK="2"))
    assert done.returncode == 1
    assert_ended_by_sigkill(done, 2)


def test_killed_in_the_middle_of_a_save(command, reference, ranks_of):
    """Rank 0 is killed when everything of the second save is written, and training goes on from the first."""
    process = command.train("cut-off", "--train.checkpoint_every=4", TEST_KILL_SAVE="2")
    done = command.finish(process)
    assert done.returncode == 1
    assert_ended_by_sigkill(done, 0)
    assert_no_ranks(ranks_of, process.pid, within=240)
    folder = command.folder / "cut-off"
    assert any(".tmp-" in path.name for path in (folder / "checkpoints").iterdir())
    assert verify(newest(folder)) == []
    again = command.finish(command.train("cut-off", "--resume=auto"))
    assert again.returncode == 0, again.stderr
    assert "resumes after step 4" in again.stdout
    assert weights(folder) == weights(reference[0])
    assert not any(".tmp-" in path.name for path in (folder / "checkpoints").iterdir())
    assert_losses_of_the_reference(command, "cut-off", reference)


@pytest.mark.storm
def test_killed_at_any_moment_and_gone_on_with_under_another_topology(new_command, reference, ranks_of):
    moment = random.Random().uniform(0, 2)
    process = new_command.train("random", "--train.checkpoint_every=2", TEST_SLEEP="0.05")
    new_command.wait_for_steps("random", 3)
    time.sleep(moment)
    process.kill()
    new_command.finish(process)
    assert_no_ranks(ranks_of, process.pid, within=240)
    cut = ["--ranks=2", "--parallel.tensor.mode=1d", "--parallel.tensor.size=2"]
    again = new_command.finish(new_command.train("random", "--resume=auto", *cut))
    assert again.returncode == 0, (moment, again.stderr)
    left = re.search(r"resumes after step (\d+)", again.stdout)
    assert left is not None, (moment, again.stdout)
    assert_losses_of_the_reference(new_command, "random", reference, left_after=int(left[1]))


def test_torchrun_starts_ranks_again_and_they_go_on(command, reference):
    """Rank 0 is killed in its second save; nobody says --resume."""
    done = command.finish(command.torchrun("restarted", "--train.checkpoint_every=4", TEST_KILL_SAVE="2"))
    assert done.returncode == 0, done.stderr
    assert "resumes after step 4" in done.stdout
    assert_losses_of_the_reference(command, "restarted", reference)


def test_ctrl_c_saves_and_one_rank_goes_on(command, reference, ranks_of):
    process, done = stop(command, "interrupted", signal.SIGINT)
    assert done.returncode == 130
    assert_no_ranks(ranks_of, process.pid)
    again = command.finish(command.train("interrupted", "--resume=auto", "--ranks=1"))
    assert again.returncode == 0, again.stderr
    assert_losses_of_the_reference(command, "interrupted", reference)


@pytest.mark.storm
def test_a_closed_terminal_saves(new_command, ranks_of):
    """All that is printed from then on fails, which must not matter."""
    mine, terminal = pty.openpty()
    move = f"import os, signal; os.login_tty(os.open({os.ttyname(terminal)!r}, os.O_RDWR)); "
    move += "signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # whoever starts the tests may ignore it, as nohup does
    process = new_command.train_after(move, "hung-up", TEST_HOLD="3", TEST_PICTURES="1")
    new_command.wait_for_steps("hung-up", 3)
    os.close(terminal)
    os.close(mine)
    done = new_command.finish(process)
    assert (done.returncode, done.stderr) == (0, "")
    assert_no_ranks(ranks_of, process.pid)
    folder = new_command.folder / "hung-up"
    assert len(read_lines(folder)) == 4
    assert inspect(newest(folder)).step == 4
    assert (folder / "loss.png").exists()


def assert_losses_of_the_reference(command, name, reference, left_after=0):
    """Of all steps; after a step at which it was asked to leave, a run does not stay for a validation."""
    for key in ("loss", "validation_loss", "gradient_norm"):
        expected = [line.get(key) for line in read_lines(reference[0])]
        found = [line.get(key) for line in read_lines(command.folder / name)]
        if key == "validation_loss" and left_after and found[left_after - 1] is None:
            expected[left_after - 1] = None
        assert found == [None if each is None else pytest.approx(each, rel=LOSS_TOLERANCE) for each in expected]


def test_a_pipeline_draws_its_last_step(command):
    """Two stages, of which each rank saves its own layers; one rank takes them all."""
    sizes = ["--model.layers=2", "--model.tied"]
    _, done = stop(command, "stages", signal.SIGTERM, "--ranks=2", "--parallel.pipeline=2", *sizes)
    for picture in ("pipeline-measured.png", "pipeline-predicted.png"):
        assert (command.folder / "stages" / picture).read_bytes().startswith(b"\x89PNG")
        assert f"wrote stages/{picture}" in done.stdout
    model = par_train.load_model(newest(command.folder / "stages"))
    assert model.head.weight is model.tokens.weight


def test_a_model_that_a_mode_cannot_cut_is_one_line(command):
    done = command.finish(command.train("uncut", "--ranks=4", "--parallel.tensor.mode=2d", "--train.batch_size=3"))
    assert done.returncode == 2
    assert done.stderr.startswith("par-train: error: the batch is 3, which does not divide by 2 ranks (row); use 4"), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1


def test_a_loss_that_is_not_finite_is_one_line(command):
    done = command.finish(command.train("infinite", "--train.learning_rate=1e20", "--train.warmup_steps=0"))
    assert done.returncode == 1
    words = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert len(words) == 1, done.stderr
    assert re.match(r"par-train: error: the loss became (nan|inf) at step \d+; lower train\.learning_rate", words[0])


def test_a_rank_that_fails_ends_the_job(command, ranks_of):
    process = command.train("failed", TEST_FAILING_RANK="1")
    done = command.finish(process)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.index("rank 1 failed") < done.stderr.index("the fault of the test")
    assert_no_ranks(ranks_of, process.pid)


@pytest.mark.storm
def test_a_killed_launcher_leaves_no_ranks(new_command, ranks_of):
    process = new_command.train("killed", TEST_HOLD="2")
    new_command.wait_for_steps("killed", 2)
    assert len(ranks_of(process.pid)) == 3
    process.kill()
    process.wait(timeout=240)
    assert_no_ranks(ranks_of, process.pid, within=240)
    new_command.finish(process)
    assert par_train.load_model(newest(new_command.folder / "killed"))


@pytest.mark.storm
def test_a_launcher_that_is_killed_at_the_start_leaves_no_ranks(new_command, ranks_of):
    """There is nothing to save yet, and so nothing to wait for."""
    process = new_command.train("unborn", TEST_SLEEP="50")
    deadline = time.monotonic() + 240
    while len(ranks_of(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)  # so that they can look whose children they are
    process.kill()
    process.wait(timeout=240)
    assert_no_ranks(ranks_of, process.pid, within=240)
    done = new_command.finish(process)
    assert "par-train: the launcher is gone; stopped before training began\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.storm
def test_a_killed_torchrun_leaves_no_ranks(new_command):
    process = new_command.torchrun("orphans", TEST_HOLD="2")
    new_command.wait_for_steps("orphans", 2)
    ranks = children_of(process.pid)
    assert len(ranks) == 3
    process.kill()
    process.wait(timeout=240)
    deadline = time.monotonic() + 240
    while any(is_alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [rank for rank in ranks if is_alive(rank)] == []
    _, err = process.communicate()
    assert "SIGTERM: saved after step" in err, err
    assert par_train.load_model(newest(new_command.folder / "orphans"))


def children_of(parent):
    """The process ids of the children of all threads of a process."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def is_alive(process):
    """Whether it has not ended; one that has, and nobody has asked for, has no command line."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_a_second_run_into_the_same_folder_is_refused(command):
    first = command.train("shared", TEST_HOLD="1")
    command.wait_for_steps("shared", 1)
    second = command.finish(command.train("shared", "--overwrite", "--seed=1", "--ranks=2"))
    assert second.returncode == 2
    refused = "par-train: error: 'shared' is being written by another run (process "
    assert second.stderr.startswith(refused), second.stderr
    assert second.stderr.count("\n") == 1, second.stderr
    first.send_signal(signal.SIGTERM)
    done = command.finish(first)
    assert done.returncode == 0, done.stderr
    lines = read_lines(command.folder / "shared")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert json.loads((newest(command.folder / "shared") / "config.json").read_text())["options"]["seed"] == 0


def test_a_signal_whose_save_fails_is_no_success(command, ranks_of):
    """The disk is full: one rank says so in a line. An earlier checkpoint is there, and stays."""
    process = command.train("unsaved", "--train.checkpoint_every=4", TEST_HOLD="5")
    command.wait_for_steps("unsaved", 5)
    for rank in ranks_of(process.pid):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (8000, 8000))  # bytes: room for the metrics, not for weights
    process.send_signal(signal.SIGTERM)
    done = command.finish(process)
    assert done.returncode == 143, done.stderr
    *_, failed, launcher = done.stderr.splitlines()
    assert re.match(r"par-train: rank \d failed: cannot write 'unsaved/checkpoints': .*File too large", failed), (
        done.stderr
    )
    assert launcher == "par-train: SIGTERM: stopped without saving"
    assert done.stderr.count("failed") == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert inspect(newest(command.folder / "unsaved")).step == 4


def test_a_disk_that_is_full_in_the_middle_of_training_is_one_line_and_costs_the_steps_since_the_last_save(
    command, reference, ranks_of
):
    go, every = command.folder / "full-go", "--train.checkpoint_every=3"
    process = command.train("full", every, TEST_HOLD="4", TEST_GO=str(go))
    command.wait_for_steps("full", 4)  # the checkpoint of step 3 is there
    for rank in ranks_of(process.pid):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (8000, 8000))  # bytes: room for the metrics, not for weights
    go.touch()
    done = command.finish(process)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("step ")]
    assert len(said) == 1, done.stderr
    assert re.match(r"par-train: rank \d failed: cannot write 'full/checkpoints': .*File too large", said[0]), said
    assert said[0].endswith("; once that is fixed, --resume auto resumes after step 3"), said
    assert_no_ranks(ranks_of, process.pid)
    folder = command.folder / "full"
    assert verify(newest(folder)) == []
    assert inspect(newest(folder)).step == 3
    assert not any(".tmp-" in path.name for path in (folder / "checkpoints").iterdir())
    assert command.finish(command.train("full", every, "--resume=auto")).returncode == 0
    assert weights(folder) == weights(reference[0])


def test_a_signal_before_training_leaves_the_run_that_was_to_be_replaced(command, reference, ranks_of):
    folder = command.folder / "kept"
    shutil.copytree(reference[0], folder)
    process = command.train("kept", "--overwrite", TEST_HOLD="0")
    deadline = time.monotonic() + 240
    while len(ranks_of(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    done = command.finish(process)
    assert done.returncode == 130
    ranks, launcher = done.stderr.splitlines()  # the ranks got Ctrl-C, or before it the launcher's own signal
    assert re.fullmatch("par-train: SIG(INT|TERM): stopped before training began", ranks)
    assert launcher == "par-train: SIGINT: stopped without saving"
    assert read_lines(folder) == read_lines(reference[0])
    assert weights(folder) == weights(reference[0])


def test_a_corrupt_checkpoint_is_one_line(command, reference):
    folder = command.folder / "corrupt"
    shutil.copytree(reference[0], folder)
    with (newest(folder) / "model.safetensors").open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"\xff\x00\xff")
    done = command.finish(command.train("corrupt", "--resume=auto", "--train.steps=16"))
    assert done.returncode == 1
    assert done.stderr.startswith("par-train: rank "), done.stderr
    assert "failed: " in done.stderr
    assert "model.safetensors" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_torchrun_ranks_that_see_another_text_all_leave(command):
    """Also that the command joins ranks that torchrun started."""
    flags = [
        "run",
        "--data.folder=text",
        "--output=other",
        "--model.context=16",
        "--train.batch_size=2",
        "--device=cpu",
    ]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "par_train"]
    done = command.finish(command.start_python(*torchrun, *flags, TEST_OTHER_TEXT="1"))
    assert done.returncode != 0
    assert done.stderr.count("par-train: error: data.folder holds another text on ranks [1] than on rank 0") == 1
    assert not (command.folder / "other" / "metrics.jsonl").exists()
