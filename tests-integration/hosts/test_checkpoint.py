"""Checkpoints of two hosts that share a file system: cut one way, loaded another, and how often each byte moves."""

import json
import sys

import pytest

pytestmark = pytest.mark.hosts

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TORCHRUN += ["--rdzv-id=checkpoint", "--rdzv-endpoint=host0:29512"]

JOB = """
import json, os, socket

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import Format, load, save, verify
from par_checkpoint.storage.local import LocalSource
from par_checkpoint.transfer.ranks import Ranks

SHAPES = {"rows": (4096, 777), "columns": (1023, 2048), "all": (3, 5, 70001)}
CUTS = {"rows": Shard(0), "columns": Shard(1), "all": Replicate()}
moved = {"read": 0, "crossed": 0}
read_into, receive = LocalSource.read_into, Ranks.receive

def counted_read(source, begin, view):
    moved["read"] += len(view)
    read_into(source, begin, view)

def counted_receive(ranks, buffer, source):
    moved["crossed"] += buffer.numel() * (source // 2 != ranks.rank // 2)  # from the other host
    return receive(ranks, buffer, source)

def cut(shape, values):
    # Tensor ranks are those of one host under 2 x 2; under 1 x 4 they are of both.
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    return {name: distribute_tensor(values[name], mesh, [Replicate(), CUTS[name]]) for name in values}

dist.init_process_group("gloo")
torch.manual_seed(0)
values = {name: torch.randn(shape) for name, shape in SHAPES.items()}
empty = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
LocalSource.read_into, Ranks.receive = counted_read, counted_receive
save("c", model=cut((2, 2), values), format=Format(max_shard_size="4MB"))
report = {"host": socket.gethostname(), "saved": moved["crossed"]}
report["sizes"] = {name: each.nbytes for name, each in values.items()}
assert verify("c") == []
for shape in ((1, 4), (2, 2), (4, 1)):
    model = cut(shape, empty)
    moved.update(read=0, crossed=0)
    load("c", model=model)
    same = all(torch.equal(model[name].full_tensor(), values[name]) for name in values)
    report["x".join(map(str, shape))] = {**moved, "same": same}
with open(f"report-{dist.get_rank()}.json", "w") as file:
    json.dump(report, file)
dist.destroy_process_group()
"""


def test_what_two_hosts_save_is_loaded_in_other_cuts_and_no_byte_is_read_twice(hosts):
    (hosts.folder / "job.py").write_text(JOB)
    for process in [hosts.start(host, *TORCHRUN, "job.py") for host in range(2)]:
        hosts.finish(process)
    reports = [json.loads((hosts.folder / f"report-{rank}.json").read_text()) for rank in range(4)]
    assert sorted(report["host"] for report in reports) == ["host0", "host0", "host1", "host1"]
    sizes = reports[0]["sizes"]
    total = sum(sizes.values())
    for cut in ("1x4", "2x2", "4x1"):
        of_cut = [report[cut] for report in reports]
        assert all(each["same"] for each in of_cut), cut
        read = sum(each["read"] for each in of_cut)
        assert total <= read <= 1.02 * total, (cut, of_cut)  # every byte once, and headers, on all hosts together
        crossed = sum(each["crossed"] for each in of_cut)
        needed = sizes["all"] + sizes["columns"] / 2 if cut == "1x4" else total
        assert crossed <= 1.001 * needed, (cut, of_cut)  # what both hosts need crosses once, however many ranks hold it
    assert sum(report["saved"] for report in reports) < 1 << 16  # each host has all: only checksums cross
