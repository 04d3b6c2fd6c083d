"""The parts of hosts, looked at on one machine: what is there, whether it is sound, and whether it can be loaded."""

import shutil
import socket
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from par_checkpoint import CheckpointError, CorruptError, Tiers, inspect, load, read_tensor, save, verify
from par_checkpoint.tools.cli import main
from par_groups import Box
from par_testing import default_device_type

HOSTS = ("a", "b")
SHAPES = {"rows": (2047, 1023), "all": (3, 700001), "odd": (3,)}


def values():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def saved(folder, *, copies, name="run/step-00000001"):
    """On every rank: the folders of all hosts, once a checkpoint of half-precision and whole numbers is there."""
    mesh, rank = init_device_mesh(default_device_type(), (2,)), dist.get_rank()
    model = {
        name: distribute_tensor(value, mesh, [Shard(0) if name == "rows" else Replicate()])
        for name, value in values().items()
    }
    with mock.patch.object(socket, "gethostname", return_value=HOSTS[rank]):
        save(name, model=model, step=1, extra={"x": 5}, tiers=Tiers([folder / HOSTS[rank]], copies=copies)).wait()
    dist.barrier()
    return [str(folder / host / name) for host in HOSTS]


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def told(*arguments, code=0):
    """What the command prints."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        assert main([str(argument) for argument in arguments]) == code
    return out.getvalue()


def box(start, size):
    return Box(start, size, 0, (1,) * len(size), ())


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
def test_what_hosts_hold_is_told_on_one_machine(tmp_path):
    folders = saved(tmp_path, copies=1)
    if dist.get_rank():
        return
    expected, shards = values(), [f"part-0000{number}-of-00002" for number in range(2)]
    contents = inspect(folders)
    assert contents.step == 1
    assert contents.extra == {"x": 5}
    assert [(part.number, part.count, part.host, part.keeper, part.fault) for part in contents.parts] == [
        (0, 2, "a", "a", ""),
        (1, 2, "b", "b", ""),
    ]
    stored = sum(value.nbytes for value in expected.values())
    assert stored < sum(part.bytes for part in contents.parts) < stored + 20_000, "each block is in one part"
    assert all(sum(b.numel for b in contents.boxes[name]) == expected[name].numel() for name in expected)
    assert verify(folders) == []
    for name, value in expected.items():
        assert torch.equal(read_tensor(folders, name), value)

    one = inspect(folders[1])
    assert [part.path for part in one.parts] == [f"{folders[1]}/{shards[1]}"]
    assert one.tensors == contents.tensors
    for name, value in expected.items():  # exactly the elements of the rectangles that are said to be there
        mine = torch.zeros_like(value, dtype=torch.bool)
        for there in one.boxes[name]:
            mine[there.slices] = True
            assert torch.equal(read_tensor(folders[1], name, there), value[there.slices])
        others = [other.slices for other in inspect(folders[0]).boxes[name]]
        assert sum(int(mine[slices].sum()) for slices in others) == 0
        assert int(mine.sum()) + sum(value[slices].numel() for slices in others) == value.numel()
    with pytest.raises(CheckpointError, match=r"is in part 0, with the data of host a, which is not in .*/b/run"):
        read_tensor(folders[1], "rows")
    faults = verify(f"{folders[1]}/{shards[1]}")
    assert faults == faults.lost
    assert "part 0 of 2, with the data of host a, is not in" in faults[0]

    text = told("ls", *folders, "--tensors")
    assert f"{folders[1]}/{shards[1]}: part 1 of 2, with the data of b, whole, " in text
    assert text.count("all of it") == 3
    lines = [
        told("ls", folder, "--tensors").splitlines()[-1] for folder in folders
    ]  # of "rows", which both have some of
    assert all("[0:" in line or ":2047, " in line for line in lines), lines
    assert told("ls", tmp_path / "a/run", tmp_path / "b/run").rstrip().endswith("2 parts of hosts, all 2 parts")
    assert "1 part of hosts, not whole; part 1 of 2" in told("ls", tmp_path / "a/run")
    with pytest.raises(ValueError, match="of which none holds a part"):
        verify([tmp_path, tmp_path / "a"])


@pytest.mark.ranks(2)
def test_one_command_tells_whether_hosts_folders_can_be_loaded(tmp_path):
    folders = saved(tmp_path, copies=2)
    if dist.get_rank():
        return
    shards = [[tmp_path / host / f"run/step-00000001/part-0000{n}-of-00002" for n in range(2)] for host in HOSTS]
    assert [(part.host, part.keeper) for part in inspect(folders).parts] == [
        ("a", "a"),
        ("b", "a"),
        ("a", "b"),
        ("b", "b"),
    ]

    def verified(*paths, code):
        return told("verify", *paths, code=code)

    assert verified(*folders, code=0) == f"{folders[0]}, {folders[1]}: whole\n"
    assert verified(folders[1], code=0) == f"{folders[1]}: whole\n"
    gone = str(tmp_path / "rebooted")
    assert "1 wrong, but other parts have it: it can be loaded" in verified(folders[0], gone, code=0)
    assert "1 wrong, 1 of them in the way of a load" in verified(shards[0][1], code=1)

    flip(shards[0][1] / "model.safetensors.part")  # a copy, on host a
    text = verified(*folders, code=0)
    assert f"block 3 of '{shards[0][1]}/model.safetensors' (from byte" in text
    assert "1 wrong, but other parts have it" in text
    assert "1 of them in the way" in verified(folders[0], code=1)
    assert verified("--shallow", folders[0], code=0).endswith(": whole\n")
    flip(shards[1][1] / "model.safetensors.part", at=-(5 << 20))  # another block of the part itself, if it has it
    flip(shards[1][1] / "model.safetensors.part")  # and the same one
    assert "of them in the way of a load" in verified(*folders, code=1)
    for host in range(2):
        flip(shards[host][0] / "model.safetensors.part", at=9)  # a header; the other parts have it
    text = verified(shards[0][0], code=1)
    assert f"the header of {shards[0][0]}/model.safetensors.part is corrupt" in text
    (shards[0][1] / "par_checkpoint.part.json").write_text("{}")
    shutil.rmtree(shards[1][1])
    shutil.rmtree(shards[1][0])
    assert "header" in told("ls", folders[0], code=1)
    (shards[0][0] / "par_checkpoint.part.json").unlink()
    with pytest.raises(CorruptError, match=r"part\.json is missing: the part is not whole; .*checksum"):
        inspect(folders[0])


def test_a_host_that_has_all_parts_is_converted_and_loaded(tmp_path):
    model = {"w": torch.randn(5, 7), "flag": torch.ones(3, dtype=torch.bool), "long": torch.arange(3)}
    save("c", model=model, tiers=Tiers([tmp_path], copies=1))
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "h")]) == 0
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "h")]) == 0
    into = {name: torch.zeros_like(value) for name, value in model.items()}
    load(tmp_path / "h", model=into)
    assert all(torch.equal(into[name], value) for name, value in model.items())
    assert torch.equal(read_tensor(tmp_path / "c", "w", box((1, 2), (3, 4))), model["w"][1:4, 2:6])
