"""The example of GRPO: a few steps by a trainer and a generator; and whole runs in which ranks are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from par_train.examples.grpo.__main__ import RankProcesses, main, read_options
from par_train.examples.grpo.roles import generate, group_advantages, open_store, policy_loss
from par_train.examples.grpo.task import Samples, draw_prompts, rewards_of, write_model

pytest.importorskip("transformers", minversion="5.4")


def test_rewards_count_the_correct_digits_of_a_sum():
    tokens = torch.tensor([[7, 10, 8, 11, 1, 5], [7, 10, 8, 11, 0, 5], [2, 10, 3, 11, 1, 0], [2, 10, 3, 11, 0, 5]])
    assert rewards_of(tokens, 10).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert torch.equal(draw_prompts(5, 4, seed=3), draw_prompts(5, 4, seed=3))
    assert draw_prompts(5, 4, seed=3)[:, [1, 3]].tolist() == [[4, 5]] * 5


def test_samples_survive_their_message():
    samples = Samples(version=3, tokens=torch.arange(6).view(1, 6), logprobs=torch.tensor([[-0.1, float("-inf")]]))
    found = Samples.from_bytes(samples.to_bytes())
    assert found.version == 3
    assert torch.equal(found.tokens, samples.tokens)
    assert torch.equal(found.logprobs, samples.logprobs)


def test_policy_loss_has_no_gradient_beyond_the_clip():
    advantages = group_advantages(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert advantages[0, 0] > 0 > advantages[0, 1]
    assert advantages[1].tolist() == [0.0, 0.0]  # equal answers teach nothing
    # Ratios 1.5, 1.5, 0.5 and 1: a good answer beyond 1.2 has no gradient, and a bad one there still has one.
    now = torch.tensor([1.5, 1.5, 0.5, 1.0]).log()[:, None].requires_grad_()
    policy_loss(now, torch.zeros(4, 1), torch.tensor([1.0, -1.0, -1.0, 1.0]), clip=0.2).backward()
    assert (now.grad.flatten() != 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=3"], "--ranks 3: --tensor 2 must divide it"),
        (["--tensor=3", "--ranks=3"], "--tensor 3: pass a divisor of 4 heads"),
        (["--prompts=5"], "--prompts 5: the 2 replicas must divide it"),
        (["--samples=1"], "--samples 1: a group of one answer has no advantages"),
        (["--lag=-1"], "--lag -1: every sample would be too old; pass 0 or more"),
        (["--base=99"], "--base 99: pass 2 to 36"),
        (["--generators=0"], "--generators 0: pass 1 or more"),
        (["--role=train"], "--role train: it needs the address of the store; pass --at"),
    ],
)
def test_sizes_that_do_not_fit_raise_before_any_rank_starts(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        read_options([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("starts", "restarts", "polled"),
    [
        ([[None, None]], 1, [None]),
        ([[0, None]], 1, [None]),
        ([[0, 0]], 1, [0]),
        ([[None, -9], [0, 0]], 1, [None, 0]),
        ([[1, -9], [None, -9]], 1, [None, -9]),
        ([[2, -9], [0, 0]], 1, [None, 0]),  # the error comes from the death of the other rank
        ([[2, 2]], 1, [2]),  # a mistake of the user, which another start would repeat
    ],
)
def test_ranks_start_again_together_after_a_death(starts, restarts, polled, monkeypatch):
    codes = [code for start in starts for code in start]
    stopped = []

    class Process:
        def __init__(self, command, env, **_):
            self.code = codes.pop(0)

        def poll(self):
            return self.code

        def kill(self):
            stopped.append(self)

        def wait(self):
            assert self in stopped

    monkeypatch.setattr(subprocess, "Popen", Process)
    job = RankProcesses("trainer", [], 2, restarts)
    assert [job.poll() for _ in polled] == polled
    assert codes == []


@pytest.mark.ranks(1, init=False)
def test_generator_with_another_vocabulary_raises(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("vocabulary", "0123456789+=")
    write_model(tmp_path / "model", base=8)
    with pytest.raises(ValueError, match=r"base=10: .*config.json is of another model"):
        write_model(tmp_path / "model", base=10)
    for folder, message in (("model", "its vocabulary is '01234567.=', and the trainer's"), ("none", "no config.json")):
        flags = ["--role=generate", f"--at=127.0.0.1:{store.port}", f"--model={tmp_path / folder}"]
        with pytest.raises(ValueError, match=message):
            generate(read_options([str(tmp_path), *flags]))


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path / "model", base=10)
    return tmp_path


@pytest.mark.ranks(3, timeout=60, init=False)
def test_grpo_trains_resumes_and_serves_versions(folder):
    """Two ranks train under ZeRO 3, and leave and resume while the third one generates."""
    at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    flags = [f"--at={at}", "--prompts=8", "--samples=4", "--tensor=1", "--ranks=2"]
    rank = int(os.environ["RANK"])
    if rank == 2:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]  # the generator is a world of its own
        assert main([str(folder), "--role=generate", *flags]) == 0
        return
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    for steps in (3, 5):
        assert main([str(folder), "--role=train", f"--steps={steps}", *flags]) == 0
    if rank:
        return
    open_store(at).set("done", "")
    published, served = (versions_of(folder, who) for who in ("trainer", "generator 0"))
    assert [each["version"] for each in published] == [1, 2, 3, 4, 5]
    for each in published:
        assert each["version"] - 5 <= each["trained_on"] < each["version"]
        assert each["trained_on"] in {version["version"] for version in served}
    assert (folder / "checkpoints" / "step-00000005" / "model.safetensors").exists()


def events_of(folder):
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def versions_of(folder, who):
    return [line for line in events_of(folder) if line["who"] == who and "version" in line]


def reward_of(folder):
    """The mean reward of the last 20 steps."""
    return sum(each["reward"] for each in versions_of(folder, "trainer")[-20:]) / 20


def command(folder, *flags):
    return subprocess.Popen([sys.executable, "-m", "par_train.examples.grpo", str(folder), *flags])


def wait_for(folder, version, process):
    """Wait until a version is trained."""
    while max([0, *(each["version"] for each in versions_of(folder, "trainer"))]) < version:
        assert process.poll() is None
        time.sleep(0.1)


@pytest.mark.storm
def test_grpo_whole_run_reaches_its_reward_when_ranks_are_killed(tmp_path):
    """Kills a rank of a generator and one of the trainer, then ends the run by Ctrl-C, and resumes it."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    first = command(tmp_path)
    for version, who in ((70, "generator"), (draw.randrange(110, 140), "trainer")):
        wait_for(tmp_path, version, first)
        pids = [line["pid"] for line in events_of(tmp_path) if "pid" in line and line["who"].startswith(who)]
        os.kill(draw.choice(pids), signal.SIGKILL)
    wait_for(tmp_path, 200, first)
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 0
    reached = versions_of(tmp_path, "trainer")[-1]["version"]
    assert 200 <= reached < 300
    assert command(tmp_path).wait(600) == 0
    published = [each["version"] for each in versions_of(tmp_path, "trainer")]
    assert published[-1] == 300
    assert published.count(101) == 2  # the trainer went back to its checkpoint
    assert published.count(reached) == 1  # and Ctrl-C lost no step
    starts = [line["who"] for line in events_of(tmp_path) if line.get("rank") == 0]
    assert starts.count("trainer") == 3
    assert starts.count("generator 0") + starts.count("generator 1") == 5
    assert reward_of(tmp_path) >= 0.8
    assert (tmp_path / "curve.svg").exists()
