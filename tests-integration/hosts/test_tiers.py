"""Checkpoints in two hosts' memory: one is killed while it saves, is replaced, and comes back from the other's."""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ._hosts import HOSTS, TIMEOUT

pytestmark = pytest.mark.hosts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]

JOB = """
import json, socket, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import Checkpoints, Tiers, _save
from par_checkpoint.storage.local import LocalSource
from par_checkpoint.transfer import write
from par_checkpoint.transfer.ranks import Ranks

SHAPES = {"rows": (4093, 777), "columns": (1023, 2048), "all": (3, 5, 70001)}
CUTS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
memory, act = sys.argv[1:]
host = socket.gethostname()

def cut(values):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(values[name], mesh, [CUTS[name]]) for name in values}

def hang(*_, **__):
    Path(f"{act}-{host}").touch()
    time.sleep(1000)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
tiers = Tiers([f"{memory}/{host}", "disk"], copies=2 if act != "alone" else 1)
checkpoints = Checkpoints("run", tiers=tiers, keep_last=2)
report = {"host": host, "rank": rank}
if act in ("write", "copy"):
    checkpoints.save(1, model=cut(values)).wait()
    dist.barrier()
    if act == "write" and host == "host1":
        write.crc32c = hang  # in the middle of its part
    if act == "copy":
        _save.copy_on = hang  # both have their parts, and neither has a copy
    checkpoints.save(2, model=cut({name: value + 1 for name, value in values.items()})).wait()
else:
    moved = {"read": 0, "slower": 0, "crossed": 0}
    read_into, receive, hosts = LocalSource.read_into, Ranks.receive, [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host)

    def counted_read(source, begin, view):
        moved["slower" if "disk" in str(source._path) else "read"] += len(view)
        read_into(source, begin, view)

    def counted_receive(ranks, buffer, source):
        moved["crossed"] += buffer.numel() * (hosts[source] != host)
        return receive(ranks, buffer, source)

    LocalSource.read_into, Ranks.receive = counted_read, counted_receive
    model = cut({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    report["step"] = checkpoints.load(model=model).step
    report["same"] = all(torch.equal(model[name].full_tensor(), values[name]) for name in values)
    same = hosts.index(host) == rank  # of what is whole on all ranks a host needs one
    report["needed"] = sum(model[name].to_local().nbytes for name in SHAPES if same or name != "all")
    report.update(moved)
    dist.barrier()
    checkpoints.save(3, model=model).wait()  # the new host, too, has its part and a copy
    dist.barrier()
    report["steps"] = sorted(path.name for path in Path(memory, host, "run").iterdir())
    with open(f"report-{act}-{rank}.json", "w") as file:
        json.dump(report, file)
dist.destroy_process_group()
"""


@pytest.fixture
def memory():
    """The memory of both hosts, a folder for each."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="par-tiers-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def start(hosts, numbers, memory, act):
    """Starts the job with so many ranks on each host; 0 leaves one out."""
    taking_part = [host for host, number in enumerate(numbers) if number]
    words = [f"--nnodes={len(taking_part)}", f"--rdzv-id={act}", f"--rdzv-endpoint={HOSTS[taking_part[0]]}:29513"]
    return [
        hosts.start(host, *TORCHRUN, *words, f"--nproc-per-node={numbers[host]}", "job.py", str(memory), act)
        for host in taking_part
    ]


def loaded(hosts, numbers, memory, act):
    """What each rank reports of a load."""
    for process in start(hosts, numbers, memory, act):
        hosts.finish(process)
    return [json.loads((hosts.folder / f"report-{act}-{rank}.json").read_text()) for rank in range(sum(numbers))]


@pytest.mark.parametrize("moment", ["write", "copy"])
def test_a_host_is_lost_while_it_saves_and_comes_back_from_the_other_ones_memory(hosts, memory, moment):
    """Two ranks on one host and one on the other save; then one and two load, and at last two on one host alone."""
    (hosts.folder / "job.py").write_text(JOB)
    running = start(hosts, (2, 1), memory, moment)
    deadline = time.monotonic() + TIMEOUT
    while not (hosts.folder / f"{moment}-host1").exists():
        assert time.monotonic() < deadline, "the second save did not begin"
        assert all(process.poll() is None for process in running), [hosts.ended(each).stderr for each in running]
        time.sleep(0.05)
    hosts.kill(1)
    shutil.rmtree(memory / HOSTS[1])  # with the host goes its memory
    hosts.kill(0)  # torchrun would wait for a new host
    for process in running:
        hosts.ended(process)
    reports = loaded(hosts, (1, 2), memory, "again")
    assert [report["step"] for report in reports] == [1, 1, 1]
    assert all(report["same"] for report in reports)
    assert all(report["slower"] == 0 for report in reports), "only memory is read"
    assert all((report["read"] == 0) == (report["host"] == "host1") for report in reports), reports
    assert all("step-00000003" in report["steps"] for report in reports)
    if moment == "write":
        assert all("step-00000002" not in report["steps"] for report in reports), "what the dead save left is swept"
    new = [report for report in reports if report["host"] == "host1"]
    needed = sum(report["needed"] for report in new)
    assert needed <= sum(report["crossed"] for report in new) < 1.02 * needed + 65536, "no byte crosses twice"
    shutil.rmtree(memory / HOSTS[0])  # now the other one: its part, and its copy, are on the new host
    reports = loaded(hosts, (0, 2), memory, "alone")
    assert [(report["step"], report["same"], report["slower"]) for report in reports] == [(3, True, 0)] * 2
