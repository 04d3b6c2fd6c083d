"""Ranks form the group of an epoch, leave it when a rank is lost, and form the next one in the same process."""

import os
import signal
import sys
import time

import pytest

from par_groups import Members

from ._jobs import Job, becomes_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="losing a rank needs Linux")


def test_survivors_form_the_next_epoch_after_a_kill(tmp_path):
    job = Job(tmp_path, "steps(40, lambda s: members.number == 1 and s == 9 and os.kill(os.getpid(), 9))", "--ranks=3")
    assert job.end() == [0]
    assert "rank 1 has ended with exit code -9" in job.errors[0]
    formed = [(each["number"], each["ranks"], each["place"]) for each in job.told if each.get("epoch") == 1]
    assert sorted(formed) == [(0, [0, 2], 0), (2, [0, 2], 1)]
    assert sorted(each["number"] for each in job.told if each.get("ended") == 1) == [0, 2]


@pytest.mark.storm
def test_spare_replaces_a_lost_rank_and_waits_before(tmp_path):
    script = "steps(40, lambda s: members.number == 0 and s == 9 and os.kill(os.getpid(), 9))"
    job = Job(tmp_path, script, "--ranks=2", "--spares=2")
    assert job.end() == [0]
    assert {tuple(each["ranks"]) for each in job.told if each.get("epoch") == 0} == {(0, 1)}
    (ranks,) = {tuple(each["ranks"]) for each in job.told if each.get("epoch") == 1}
    assert len(ranks) == 2  # rank 1 and one of the two spares; the other one learns that the run is over
    assert 1 in ranks
    assert len([each for each in job.told if each.get("over")]) <= 1


@pytest.mark.storm
def test_restarted_rank_joins_as_a_spare(tmp_path):
    script = "steps(30, lambda s: members.number == 1 and s == 5 and os._exit(3))\n"
    job = Job(tmp_path, script, "--ranks=2", "--restarts=1")
    assert job.end() == [0]
    assert "rank 1 has ended with exit code 3" in job.errors[0]
    # The new process has number 2. Whether it comes in time depends on the machine.
    assert {tuple(each["ranks"]) for each in job.told if "ranks" in each} <= {(0, 1), (0,), (0, 2)}


@pytest.mark.storm
def test_loss_explains_an_error_that_comes_long_before_its_report(tmp_path):
    script = """
members.form(timeout=60)
tell(keeper=os.getppid())
try:
    while True:
        dist.all_reduce(torch.ones(10))
except RuntimeError as error:
    begin = time.time()
    tell(explained=members.is_broken(error), waited=time.time() - begin)
    members.form()
"""
    job = Job(tmp_path, script, "--ranks=2", "--lease=60")
    job.wait_for(lambda told: len(told) == 2)
    keeper, victim = job.told[0]["keeper"], next(each["pid"] for each in job.told if each["number"] == 1)
    os.kill(keeper, signal.SIGSTOP)  # as on a machine on which the keeper is not scheduled
    os.kill(victim, signal.SIGKILL)
    time.sleep(7)
    os.kill(keeper, signal.SIGCONT)
    assert job.end() == [0]
    (found,) = [each for each in job.told if "explained" in each]
    assert found["explained"]
    assert 5 < found["waited"] < 30


# A collective of small tensors ends with its connections. Of a large one, gloo has a part of a message in its hands.
@pytest.mark.parametrize("operation", ["broadcast", "all_to_all", "send", "all_reduce"])
def test_rank_that_dies_within_a_large_message_holds_up_no_other(tmp_path, operation):
    script = f"""
import threading
def rounds(rank, size, tensor):
    if "{operation}" == "broadcast":
        dist.broadcast(tensor, 1)
    elif "{operation}" == "all_reduce":
        dist.all_reduce(tensor)
    elif "{operation}" == "all_to_all":
        dist.all_to_all_single(torch.empty_like(tensor), tensor)
    else:
        sent = dist.isend(tensor, (rank + 1) % size)
        dist.irecv(torch.empty_like(tensor), (rank - 1) % size).wait()
        sent.wait()

members.form(timeout=300)
if members.number == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
begin = time.monotonic()
try:
    while True:
        rounds(members.place, 3, torch.ones(3 << 20))
except RuntimeError as error:
    tell(took=time.monotonic() - begin, lost=members.is_broken(error))
members.form(timeout=300)
dist.all_reduce(torch.ones(3))
tell(healed=time.monotonic() - begin)
"""
    job = Job(tmp_path, script, "--ranks=3")
    assert job.end() == [0], job.errors
    assert [each["lost"] for each in job.told if "took" in each] == [True, True]
    healed = [each["healed"] for each in job.told if "healed" in each]
    assert len(healed) == 2
    assert max(healed) < 30  # far below the timeout of the group


@pytest.mark.storm
def test_fifty_epochs_leave_no_descriptors_threads_or_memory(tmp_path):
    script = """
import resource, threading
held = []  # as modules hold their groups
def usage():
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return dict(files=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")), rss=pages * 4096)

for epoch in range(51):
    members.form(timeout=30)
    held[:] = [dist.group.WORLD, dist.new_group([0, 1])]
    dist.all_reduce(torch.ones(1 << 16), group=held[1])
    if epoch in (10, 50):
        tell(usage=usage())
    if members.number == 0 and epoch < 50:
        members.abandon()
    try:
        if epoch < 50:
            dist.all_reduce(torch.ones(10), group=held[1])
    except RuntimeError:
        pass
"""
    job = Job(tmp_path, script, "--ranks=2")
    assert job.end() == [0], job.errors
    for number in (0, 1):
        early, late = (each["usage"] for each in job.told if each["number"] == number)
        # The groups of the latest epoch end a moment late. Epochs that stayed would keep 40 times as many as one.
        assert late["files"] <= early["files"] + 8
        assert late["threads"] <= early["threads"] + 8
        assert late["rss"] <= early["rss"] + 20e6  # an epoch that stayed would keep 8 MB of stack for each thread


@pytest.mark.storm
def test_ranks_that_die_while_they_connect_hold_up_no_other(tmp_path):
    script = """
import random, threading

start = members._start
def start_and_die(ranks, timeout):
    if members.number >= 2 and members.epoch < 40:
        threading.Timer(random.random() ** 2 * 0.06, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return start(ranks, timeout)
members._start = start_and_die

while True:
    begin = time.monotonic()
    if members.form(timeout=60) is None:
        break
    tell(epoch=members.epoch, took=time.monotonic() - begin)
    try:
        more = torch.zeros(())
        while not more:
            time.sleep(0.01)
            more.fill_(members.spares if members.place == 0 else 0)
            dist.all_reduce(more)
            members.report()
            if members.epoch >= 40:
                os._exit(0)
    except RuntimeError:
        pass
"""
    job = Job(tmp_path, script, "--ranks=3", "--restarts=200")
    assert job.end(240) == [0]
    took = [each["took"] for each in job.told if each["number"] < 2]
    assert len(took) > 40
    assert max(took) < 30  # most take 20 ms; a wait for a dead peer would end at the timeout


def test_members_without_a_keeper_raise_an_error():
    with pytest.raises(RuntimeError, match=r"no keeper has started this process.*python -m par_groups\.elastic"):
        Members({})


@pytest.mark.storm
def test_members_die_with_their_keeper_and_stopped_ones_too(tmp_path):
    job = Job(tmp_path, "steps(4000)", "--ranks=2")
    first, second = job.pid_of(0), job.pid_of(1)
    os.kill(second, signal.SIGSTOP)
    job.keepers[0].kill()
    assert becomes_gone(first)
    assert becomes_gone(second)
    assert job.end() == [-9]
