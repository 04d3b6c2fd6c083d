"""A run goes on after ranks are lost, and ends with the weights of the run without a loss."""

import copy
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from par_checkpoint import load, verify
from par_data import ShardedDataLoader
from par_train import Survivors, TrainState
from par_train.run.survive.options import lanes_of, mean_of
from par_train.run.survive.reports import RankReport, RingPlace, is_whole
from par_train.run.survive.step import SurvivedStep, loss_and_items

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="losing a rank needs Linux")

SCRIPT = Path(__file__).with_name("survivors_job.py")
STEPS = 10
IN_MOVES = ("connected", "formed", "told", "built", "moved")
"""They need an epoch that begins at the step: another rank dies first."""

PHASES = ("forward", "backward", "sending", "reduced", "passed", "updated", *IN_MOVES)


class OneRank:
    """A run that reads one row in each try, as one rank among others."""

    rows = 0

    def run(self, number, loss_of):
        self.rows += 1
        return loss_of(None, number)


def test_step_that_raised_an_error_is_not_run_again():
    """The second try would read the next rows, while the other ranks are at the rows of the first one."""
    survivors = OneRank()
    step = SurvivedStep(survivors.run, 3)
    with pytest.raises(KeyError):
        step.run(lambda _, batch: {}[batch])
    with pytest.raises(RuntimeError, match="step 3 has raised an error on this rank, and cannot be run again"):
        step.run(lambda _, batch: batch)
    assert survivors.rows == 1
    assert SurvivedStep(survivors.run, 4).run(lambda _, batch: batch) == 4


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (None, TypeError, "returned a NoneType: it is no loss"),
        (1.5, TypeError, "returned a float: it is no loss"),
        ((torch.ones(()), "3"), TypeError, "returned a tuple: it is no loss"),
        (torch.ones(2, requires_grad=True), ValueError, r"loss of shape \(2,\) of 4 items"),
        (torch.ones(()), ValueError, "requires_grad=False"),
        ((torch.ones((), requires_grad=True), -1), ValueError, "of -1 items"),
    ],
)
def test_loss_that_a_step_cannot_use_raises(given, error, text):
    with pytest.raises(error, match=text):
        loss_and_items(given, 4)


def test_loss_and_items_is_a_sum_and_a_number():
    mean = torch.ones((), requires_grad=True)
    assert loss_and_items(mean, 4) == (4, 4)
    assert loss_and_items((mean, 3), 4) == (1, 3)


def job_module():
    spec = importlib.util.spec_from_file_location("survivors_job", SCRIPT)
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    return job


def expected(steps=STEPS, back=(None, None), rows=None, **kind):
    """The weights, with their average, and the losses of one process that is never disturbed.

    Args:
        steps: Number of steps.
        back: A step before which the state is kept, and one before which it is restored.
        rows: Number of rows of each batch that count; None: all.
        kind: What the job's function for its objects takes.
    """
    job = job_module()
    model, optimizer, plain, scheduler = job.objects(**kind)
    loader, losses, average = ShardedDataLoader(plain, rank=0, num_replicas=1, seed=0), [], {}
    for step in range(steps):
        if step == back[0]:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == back[1]:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        loss = job.loss_of(model, [part[:rows] for part in next(iter(loader))])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        job.averaged(average, model)
    return {**model.state_dict(), **{f"average.{name}": tensor for name, tensor in average.items()}}, losses


def start(folder, *options, **given):
    """Start a job under a keeper."""
    given = {"lines": str(folder / "told"), "steps": STEPS, **given}
    command = [sys.executable, "-m", "par_groups.elastic", *options, "--", sys.executable, str(SCRIPT)]
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [*command, json.dumps(given)],
        stderr=subprocess.PIPE,
        text=True,
        env={**variables, "OMP_NUM_THREADS": "1"},
    )


def lines_of(folder):
    found = folder / "told"
    # A rank that was killed may have written half a line.
    whole = [line for line in found.read_text().split("\n")[:-1] if line.startswith("{")] if found.exists() else []
    return [json.loads(line) for line in whole]


def states_of(folder):
    return [torch.load(path) for path in sorted(folder.glob("told.*")) if path.is_file()]


def end(folder, job, *, steps=STEPS, timeout=300, back=(None, None), **kind):
    """Wait for a job, compare its weights and losses with the undisturbed run, and return what its ranks wrote."""
    try:
        errors = job.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired:
        job.kill()
        pytest.fail(f"the job has not ended: {job.communicate()[1]}")
    finally:
        job.kill()
    assert job.returncode == 0, errors
    weights, losses = expected(steps, back, **kind)
    told = lines_of(folder)
    for each in told:
        # The order of sums depends on the number of ranks: some units in the last place of fp64.
        assert each["loss"] == pytest.approx(losses[each["step"]], rel=1e-10)
    states = states_of(folder)
    assert len(states) == len(told[-1]["ranks"])
    for state in states:
        calls = state.pop("0.calls")
        assert calls == weights["0.calls"]  # the call of a step that was done again is not counted twice
        state.pop("1.1.running_var", None)  # its factor n / (n - 1) depends on the rows of a rank
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-10)
    return told


def test_survivors_share_the_batch_after_a_loss(tmp_path):
    job = start(tmp_path, "--ranks=3", kills=[[1, 2, "reduced"]])
    told = end(tmp_path, job)
    sizes = {each["step"]: len(each["ranks"]) for each in told}
    assert [sizes[step] for step in (0, 1, 3, 9)] == [3, 3, 2, 2]


@pytest.mark.parametrize("zero", [0, 2])
def test_survivors_train_on_while_a_rank_has_no_items(tmp_path, zero):
    """A mean of no item is NaN, and a step with NaN on any rank would change nothing on all of them."""
    end(tmp_path, start(tmp_path, "--ranks=2", masked=1, zero=zero), rows=6)


def test_survivors_raise_if_a_rank_leaves_the_run_early(tmp_path):
    job = start(tmp_path, "--ranks=3", leaves=[1, 2])
    errors = job.communicate(timeout=200)[1]
    assert job.returncode == 1
    assert errors.count("step 2: another rank has ended with exit code 0, which ends the run for all ranks") == 2
    assert max(each["step"] for each in lines_of(tmp_path)) == 1


def test_survivors_restore_the_shard_of_a_lost_rank(tmp_path):
    # After `ready` rank 1 takes its shard with it, and rank 2 has stepped the copy.
    job = start(tmp_path, "--ranks=3", zero=3, kills=[[1, 2, "passed"]])
    told = end(tmp_path, job)
    assert {each["number"] for each in told if each["step"] == 9} == {0, 2}


@pytest.mark.parametrize(
    ("cuts", "whole"),
    [
        ([[(0, 0, 3)], [(0, 1, 3)], [(0, 2, 3)]], True),
        ([[(0, 0, 3)], [(0, 2, 3)]], True),
        ([[(0, 0, 4)], [(0, 2, 4)]], True),
        ([[(0, 0, 4)], [(0, 3, 4)]], False),  # ranks 1 and 2 are neighbours
        ([[(0, 3, 4)], [(0, 1, 4)]], True),
        ([[(0, 0, 2)]], True),
        ([[(0, 0, 1)]], True),
        ([[], [(0, 0, 3)]], False),  # a rank whose copy is stale
        ([[(0, 0, 4), (1, 0, 3)], [(0, 2, 4)]], True),  # a move that only one rank has ended
        ([[(1, 0, 3)], [(0, 2, 4)]], False),  # two shardings, of which none is whole
        ([[(0, 0, 3)], [(1, 1, 3)], [(1, 2, 3)]], True),
    ],
)
def test_is_whole_finds_a_sharding_that_ranks_hold(cuts, whole):
    assert is_whole([[RingPlace(*cut) for cut in of_rank] for of_rank in cuts]) is whole


@pytest.mark.storm
@pytest.mark.parametrize("zero", [1, 3])
def test_copies_have_what_a_load_has_written(tmp_path, zero):
    back = (2, 5)
    job = start(tmp_path, "--ranks=3", zero=zero, kills=[[1, 7, "reduced"]], back=back)
    told = end(tmp_path, job, back=back)
    assert {each["number"] for each in told if each["step"] == 9} == {0, 2}


@pytest.mark.storm
def test_repeated_steps_count_once_in_batch_norm_and_average(tmp_path):
    # A step that is done again, and one that the others complete.
    job = start(tmp_path, "--ranks=3", kills=[[1, 2, "reduced"], [2, 6, "passed"]], norm=True)
    told = end(tmp_path, job, norm=True)
    assert {each["step"]: each["again"] for each in told}[2] == 1
    [state] = states_of(tmp_path)
    assert state["1.1.num_batches_tracked"] == STEPS
    assert sum(name.startswith("average.") for name in state) == 6


@pytest.mark.storm
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("phase", ["saving", "copying"])
def test_loss_within_a_save_leaves_complete_checkpoints(tmp_path, phase, zero):
    tiers = [tmp_path / "near", tmp_path / "far"]
    job = start(tmp_path, "--ranks=3", zero=zero, kills=[[1, 3, phase]], tiers=[*map(str, tiers)])
    told = end(tmp_path, job)
    assert told[-1]["ranks"] == [0, 2]
    failed = set()
    for number in (0, 2):
        outcomes = json.loads((tmp_path / f"saves.{number}").read_text())
        failed |= {int(step) for step, outcome in outcomes.items() if outcome != "saved"}
        assert len(failed) == 1
        assert outcomes[str(*failed)].startswith("UnansweredError")
    [step] = failed
    assert [(folder / f"step-{step}").exists() for folder in tiers] == [phase == "copying", False]
    saved = sorted(path for folder in tiers for path in folder.glob("step-*"))
    assert {path.name for path in saved} >= {f"step-{step}" for step in {*range(STEPS)} - failed}
    for path in saved:
        verify(path)
        model, optimizer, *_ = job_module().objects()
        load(path, model=model, optimizer=optimizer)
        weights, _ = expected(int(path.name.removeprefix("step-")))
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-10)


@pytest.mark.storm
@pytest.mark.parametrize("zero", range(4))
def test_canonical_run_has_equal_bits_after_a_loss(tmp_path, zero):
    # Six lanes divide by three ranks and by two.
    options, found = {"numerics": "canonical", "lanes": 6}, []
    for number, kills in enumerate(([], [[1, 3, "reduced"]], [[2, 3, "passed"]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = start(folder, "--ranks=3", zero=zero, kills=kills, options=options)
        errors = job.communicate(timeout=300)[1]
        assert job.returncode == 0, errors
        found += states_of(folder)
    assert len(found) == 3 + 2 + 2
    for state in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0].items() if name != "0.calls")


@pytest.mark.storm
def test_loss_of_two_neighbours_is_named(tmp_path):
    job = start(tmp_path, "--ranks=4", zero=1, kills=[[1, 2, "reduced"], [2, 2, "built"]])
    errors = job.communicate(timeout=300)[1]
    assert job.returncode != 0
    assert "a rank and the next one, which held the copy of its shard, are lost together" in errors


@pytest.mark.storm
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_losses_that_are_no_neighbours_while_state_moves(tmp_path, zero):
    phase = random.Random(zero).choice(IN_MOVES)
    job = start(tmp_path, "--ranks=4", zero=zero, kills=[[1, 2, "reduced"], [3, 2, phase]])
    told = end(tmp_path, job)
    assert told[-1]["ranks"] == [0, 2]


@pytest.mark.storm
def test_survivors_share_the_batch_after_two_losses(tmp_path):
    # A batch of 12 on 4, 3 and 2 ranks: before any rank has passed `ready`, and after all have.
    job = start(tmp_path, "--ranks=4", kills=[[1, 2, "reduced"], [2, 6, "passed"]])
    told = end(tmp_path, job)
    sizes = {each["step"]: len(each["ranks"]) for each in told}
    assert [sizes[step] for step in (0, 1, 3, 5, 7, 9)] == [4, 4, 3, 3, 2, 2]
    assert {each["number"] for each in told if each["step"] == 9} == {0, 3}


@pytest.mark.storm
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_batch_is_shared_by_fewer_and_by_more_ranks(tmp_path, zero):
    # 4, 3 and 2 ranks, and then the ranks that are started again join one after the other.
    kills = [[1, 2, "reduced"], [3, 3, "passed"]]
    job = start(tmp_path, "--ranks=4", "--restarts=2", zero=zero, kills=kills, pause=0.2, steps=150)
    told = end(tmp_path, job, steps=150)
    sizes = [len(each["ranks"]) for each in told]
    assert {2, 3, 4} <= set(sizes)
    assert sizes[-1] == 4


@pytest.mark.storm
def test_second_loss_while_state_moves(tmp_path):
    # Rank 0 dies while the others wait for it in a call of par-checkpoint, which gloo does not know of.
    job = start(tmp_path, "--ranks=3", kills=[[1, 2, "reduced"], [0, 2, "built"]])
    told = end(tmp_path, job)
    assert told[-1]["ranks"] == [2]


@pytest.mark.storm
def test_loss_of_all_that_hold_the_state_is_named(tmp_path):
    # Rank 0 dies before the spare has received anything, so nobody has the state of step 2.
    job = start(tmp_path, "--ranks=2", "--spares=1", kills=[[1, 2, "reduced"], [0, 2, "built"]], pause=0.5)
    errors = job.communicate(timeout=300)[1]
    assert job.returncode != 0
    # A spare that was too late was asked for nothing, and the run has failed all the same.
    assert "all ranks that had the state of the run are lost" in errors or "StateLostError" not in errors


@pytest.mark.storm
def test_spare_joins_and_receives_the_state(tmp_path):
    job = start(tmp_path, "--ranks=2", "--spares=1", kills=[[0, 3, "updated"]], pause=0.2, steps=30)
    told = end(tmp_path, job, steps=30)
    assert set(told[-1]["ranks"]) == {1, 2}


# An all-reduce that a loss interrupts may have ended on some ranks only.
@pytest.mark.parametrize("zero", [1, 3])
def test_step_counts_if_some_ranks_have_not_seen_that_all_are_ready(tmp_path, zero):
    told = end(tmp_path, start(tmp_path, "--ranks=4", zero=zero, kills=[[2, 4, "passed"]], blind=[[0, 4], [3, 4]]))
    assert {each["again"] for each in told if each["step"] == 4} == {0}


@pytest.mark.storm
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("spares", [0, 1])
def test_kill_at_each_phase_of_each_rank(tmp_path, spares, zero, victim, phase):
    if phase == "sending" and not zero:
        pytest.skip("stage 0 sends no gradients to copies")
    kills, ranks = [[victim, 4, phase]], 3
    if phase in IN_MOVES:
        # Under ZeRO 1 to 3 the rank that dies first must not be a neighbour.
        ranks = 4 if zero else 3
        kills.append([(victim + 2) % ranks, 4, "reduced"])
    end(tmp_path, start(tmp_path, f"--ranks={ranks}", f"--spares={spares}", zero=zero, kills=kills))


def recorded():
    """The trials of a storm in the file that PAR_STORM_RECORD names: runs one after the other add up."""
    record = Path(os.environ.get("PAR_STORM_RECORD", os.devnull))
    return [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []


# A trial takes a minute or two on a quiet machine. With PAR_STORM_RECORD=FILE a trial that passed is written to the
# file with its seed, and a later run with the same file skips it: `-k "random_kills and [3]"` runs one trial only.
@pytest.mark.storm
@pytest.mark.parametrize("trial", range(20))
def test_random_kills_by_the_clock(tmp_path, trial):
    before = recorded()
    if any(each["trial"] == trial for each in before):
        pytest.skip(f"trial {trial} is in {os.environ['PAR_STORM_RECORD']}")
    first = before[0]["seed"] - before[0]["trial"] if before else time.time_ns() % 2**31
    seed = int(os.environ.get("PAR_STORM_SEED", first)) + trial
    print("seed", seed)
    rng, kills, seconds, zero = random.Random(seed), 0, [], trial % 4
    # A kill mostly comes between small messages, and within large ones.
    width, steps = [(13, 400), (100_000, 150)][trial // 4 % 2]
    begin = time.monotonic()
    job = start(tmp_path, "--ranks=4", "--restarts=10", steps=steps, pause=0.05, zero=zero, width=width)
    deadline = begin + 240
    while job.poll() is None and kills < 10 and time.monotonic() < deadline:
        time.sleep(rng.random() * 2)
        lines = lines_of(tmp_path)
        if not lines or lines[-1]["step"] > steps - 5:
            continue
        # Children of the keeper; one stays, because a state that nobody holds is lost.
        pids = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        ranks = lines[-1]["ranks"]
        if len(ranks) < 2 or len(pids) < 3:
            continue
        victim, killed = int(rng.choice(pids)), time.time()
        os.kill(victim, signal.SIGKILL)
        kills += 1
        number = next((each["number"] for each in lines if each["pid"] == victim), None)
        while job.poll() is None and time.monotonic() < deadline:
            later = [each for each in lines_of(tmp_path) if each["time"] > killed + 0.05]
            # The next rank may be lost only when others have its state again: after a step without it. A process that
            # has not written yet is a spare, or has just joined.
            healed = number is not None and any(number not in each["ranks"] for each in later)
            if later and (healed or time.time() - killed > 10):
                seconds.append(later[0]["time"] - killed)
                break
            time.sleep(0.02)
    told = end(tmp_path, job, steps=steps, timeout=300, width=width)
    # A step is done again by all ranks or by none, so any of them has the number.
    again = {each["step"]: each["again"] for each in told}
    outcome = {"trial": trial, "seed": seed, "zero": zero, "kills": kills, "steps done again": sum(again.values())}
    outcome["seconds to the end of the next step"] = [round(each, 2) for each in seconds]
    outcome["seconds"] = round(time.monotonic() - begin)
    every = [*before, outcome]
    print(outcome, "\nso far", {name: sum(each[name] for each in every) for name in ("kills", "steps done again")})
    assert sum(again.values()) <= kills
    assert max(seconds, default=0.0) < 30
    if "PAR_STORM_RECORD" in os.environ:
        with Path(os.environ["PAR_STORM_RECORD"]).open("a") as record:
            record.write(json.dumps(outcome) + "\n")


def nothing(_):
    return TrainState(model=nn.Linear(2, 2), optimizer=None, loader=None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spares": "soon"}, ["spares='soon'", "pass 'join' or 'wait'"]),
        ({"device": "cuda"}, ["device='cuda'", "survivors need gloo", "an abort of an NCCL communicator"]),
        ({"parallel": {"tensor": 2}}, ["parallel={'tensor': 2}", "only data-parallel replicas of one rank"]),
        ({"parallel": {"pipeline": 2}}, ["parallel={'pipeline': 2}", "start the job again from its checkpoint"]),
        ({"parallel": {"sequence": {"size": 2}}}, ["only data-parallel replicas of one rank"]),
        ({"zero": 1, "precision": "bf16-sr"}, ["precision='bf16-sr', zero=1", "use precision='bf16' or zero=0"]),
        ({"memory": {"device": "1GB"}}, ["memory", "remove memory and offload"]),
        ({"zero": {"stage": 0, "offload": True}}, ["remove memory and offload"]),
    ],
)
def test_unsupported_option_raises_before_anything_starts(options, words):
    with pytest.raises(ValueError, match=words[0].split("=")[0]) as raised:
        Survivors(nothing, **options)
    for word in words:
        assert word in str(raised.value)


def test_lanes_of_a_batch_have_equal_rows():
    rows = torch.arange(12).view(6, 2)
    lanes = lanes_of({"rows": rows, "kind": "text"}, 3)
    assert [lane["rows"].tolist() for lane in lanes] == rows.view(3, 2, 2).tolist()
    assert {lane["kind"] for lane in lanes} == {"text"}
    with pytest.raises(ValueError, match="the batch of a rank has 6 rows, which 4 lanes do not divide; pass"):
        lanes_of([rows], 4)


def test_loss_of_a_lane_as_a_sum_raises():
    with pytest.raises(ValueError, match="each lane of canonical numerics weighs the same; return a mean"):
        mean_of((torch.ones(()), 3))


def test_update_counts_if_its_group_is_gone_after_ready():
    def gather():
        raise TypeError("value was None")  # as torch does for a group that was destroyed

    survivors = object.__new__(Survivors)
    survivors._told, survivors._has_formed = RankReport(steps=3, passed=3, loss=0.0, samples=1.0), True
    update = survivors._update_of(gather)
    update()
    survivors._has_formed = False
    with pytest.raises(TypeError):
        update()


def test_survivors_without_a_keeper_raise():
    with pytest.raises(RuntimeError, match="no keeper has started this process"):
        Survivors(nothing)
