"""Keepers see deaths, fence ranks that hang, and end their ranks when they cannot renew their lease."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from par_groups import keep

from ._jobs import Job, becomes_gone, is_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="losing a rank needs Linux")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": []}, "command is empty; pass the command of a rank"),
        ({"command": ["a"], "ranks": 0}, "ranks=0: it must be positive"),
        ({"command": ["a"], "lease": -1.0}, "lease=-1.0: it must be positive"),
        ({"command": ["a"], "patience": 0}, "patience=0: it must be positive"),
    ],
)
def test_keep_with_a_wrong_argument_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        keep(**arguments)


@pytest.mark.storm
def test_exit_code_of_a_rank_that_fails_is_the_keepers(tmp_path):
    job = Job(tmp_path, "os._exit(7)", "--ranks=2")
    assert job.end() == [7]


@pytest.mark.storm
def test_job_fails_although_its_spare_ends_well(tmp_path):
    job = Job(tmp_path, "steps(40, lambda s: os._exit(7))", "--ranks=1", "--spares=1")
    assert job.end() == [7]
    assert "no rank with the state is left; start the job again from its checkpoint" in job.errors[0]


@pytest.mark.storm
def test_stopped_rank_is_fenced_and_never_returns(tmp_path):
    job = Job(tmp_path, "steps(150)", "--ranks=3", "--patience=3")
    job.wait_for(lambda told: len(told) == 3)
    pid = job.pid_of(1)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.time()
    formed = job.wait_for(lambda told: [each for each in told if each.get("epoch") == 1])
    assert is_gone(pid)  # it was dead before anyone went on without it
    assert formed[0]["ranks"] == [0, 2]
    assert formed[0]["time"] - stopped > 2
    assert job.end() == [0]
    assert "rank 1 has not moved for 3 s and is killed" in job.errors[0]


@pytest.mark.storm
def test_rank_that_hangs_in_python_is_fenced(tmp_path):
    # It beats, because its threads run, but the other ranks wait for it.
    script = "steps(100, lambda s: members.number == 1 and s == 9 and time.sleep(600))"
    job = Job(tmp_path, script, "--ranks=3", "--patience=3")
    assert job.end() == [0]
    assert sorted(each["number"] for each in job.told if each.get("ended") == 1) == [0, 2]


@pytest.mark.storm
def test_other_hosts_go_on_when_a_keeper_dies(tmp_path):
    job = Job(tmp_path, "steps(200)", "--lease=2", hosts=3)
    pid = job.pid_of(1)
    job.wait_for(lambda told: len(told) == 3)
    job.keepers[1].kill()
    assert becomes_gone(pid)
    assert job.end() == [0, -9, 0]
    assert sorted(each["number"] for each in job.told if each.get("ended") == 1) == [0, 2]


@pytest.mark.storm
def test_all_hosts_leave_when_the_first_one_is_lost(tmp_path):
    job = Job(tmp_path, "steps(4000)", "--lease=2", hosts=2)
    pid = job.pid_of(1)
    job.wait_for(lambda told: len(told) == 2)
    job.keepers[0].kill()
    assert job.end() == [-9, 1]
    assert is_gone(pid)


@pytest.fixture
def namespaces():
    """Two network namespaces with a link between them: their names, and the addresses in them."""
    names = [f"par-{os.getpid()}-{side}" for side in "ab"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a partition between two network namespaces needs root and ip(8)")
    run = lambda *words: subprocess.run(["ip", *words], check=True)  # noqa: E731
    try:
        subprocess.run(["ip", "netns", "add", names[0]], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr!r}")
    try:
        run("netns", "add", names[1])
        link = [f"par{os.getpid() % 10000}{side}" for side in "ab"]
        run("link", "add", link[0], "type", "veth", "peer", "name", link[1])
        for name, each, address in zip(names, link, ("10.99.0.1", "10.99.0.2"), strict=True):
            run("link", "set", each, "netns", name)
            run("-n", name, "addr", "add", f"{address}/24", "dev", each)
            run("-n", name, "link", "set", each, "up")
            run("-n", name, "link", "set", "lo", "up")
        yield names, link
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.storm
def test_one_side_goes_on_after_a_partition(tmp_path, namespaces):
    names, link = namespaces

    def inside(host):
        return ["ip", "netns", "exec", names[host], "env", f"GLOO_SOCKET_IFNAME={link[host]}"]

    options = ("--lease=3", "--ranks=2")
    job = Job(tmp_path, "steps(300)", *options, hosts=2, inside=inside, address="10.99.0.1")
    job.wait_for(lambda told: len(told) == 4)
    cut = time.time()
    # The link goes without a word: no socket learns of it, so gloo alone would wait for its timeout.
    subprocess.run(["ip", "-n", names[0], "link", "set", link[0], "down"], check=True)
    assert job.end() == [0, 1]
    assert sorted(each["number"] for each in job.told if each.get("ended") == 1) == [0, 1]
    formed = [each for each in job.told if each.get("epoch") == 1]
    assert [each["ranks"] for each in formed] == [[0, 1], [0, 1]]
    assert 2 < min(each["time"] for each in formed) - cut < 20
