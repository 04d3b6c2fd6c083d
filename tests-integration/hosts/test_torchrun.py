"""torchrun on two hosts: one run over both, and a host that is lost and replaced."""

import sys

import pytest

from ._hosts import JOB, LOSS_TOLERANCE, losses_of, reference, write_text

pytestmark = pytest.mark.hosts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-id=par", "--rdzv-endpoint=host0:29511"]


def test_torchrun_over_two_hosts_trains_as_one_host_does(hosts):
    """Replicas across the hosts, tensor ranks inside of them; one host saves, and both have the checkpoint."""
    write_text(hosts.folder / "text")
    started = [hosts.start(host, *TORCHRUN, "-m", "par_train", *JOB, "--output=two") for host in range(2)]
    for process in started:
        hosts.finish(process)
    expected = reference(hosts.folder, *JOB, ranks=4)
    assert losses_of(hosts.folder / "two") == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert (hosts.folder / "two" / "checkpoints" / "step-00000012" / "model.safetensors").exists()


def test_a_host_that_is_lost_is_replaced_and_the_run_goes_on(hosts):
    """The ranks of the other host start again, those of the new one for the first time: all go on together."""
    write_text(hosts.folder / "text")
    elastic = [
        "env",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        *TORCHRUN,
        "--max-restarts=1",
        "-m",
        "par_train",
        *JOB,
        "--train.checkpoint_every=3",
        "--output=lost",
    ]
    first, lost = hosts.start(0, *elastic), hosts.start(1, *elastic, TEST_HOLD="7")
    hosts.wait_for_steps("lost", 7)
    hosts.kill(1)
    assert hosts.ended(lost).returncode != 0
    new = hosts.start(1, *elastic)
    ended = [hosts.ended(process) for process in (first, new)]
    assert [done.returncode for done in ended] == [0, 0], "".join(done.stderr for done in ended)
    expected = reference(hosts.folder, *JOB, ranks=4)
    assert losses_of(hosts.folder / "lost") == pytest.approx(expected, rel=LOSS_TOLERANCE)
