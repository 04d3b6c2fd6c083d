import json
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.lr_scheduler import MultiStepLR

from par_checkpoint import CorruptError, Format, Transfer, load, save, verify
from par_checkpoint import _save as saving
from par_checkpoint._torch_style import _MemoryWriter
from par_checkpoint.format.manifest import BLOCK
from par_checkpoint.storage.local import LocalSource
from par_groups import Box, Sharding
from par_testing import default_device_type

from .helpers import RUNS, make_model, train


def trained():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = MultiStepLR(optimizer, milestones=[1, 3])
    train(model, optimizer, range(2))
    scheduler.step()
    return model, optimizer, scheduler


def test_torch_load_opens_every_file(tmp_path):
    model, optimizer, scheduler = trained()
    extra = {"seen": 7, "rng": torch.get_rng_state()}
    save(
        tmp_path / "c", model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, format=Format(style="torch")
    )
    files = sorted(path.name for path in (tmp_path / "c").iterdir() if path.suffix == ".pt")
    assert files == ["extra.pt", "model.pt", "optimizer.pt", "scheduler.pt"]
    opened = {name.removesuffix(".pt"): torch.load(tmp_path / "c" / name, weights_only=True) for name in files}
    other = make_model(1)
    other.load_state_dict(opened["model"])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    names = dict(model.named_parameters())
    assert opened["optimizer"]["param_groups"][0]["params"] == list(names)
    for name, parameter in names.items():
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(opened["optimizer"]["state"][name][slot], value)
    assert opened["scheduler"] == scheduler.state_dict()
    assert opened["extra"]["seen"] == 7
    assert torch.equal(opened["extra"]["rng"], extra["rng"])


def test_everything_comes_back(tmp_path):
    model, optimizer, scheduler = trained()
    save(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra={"seen": 7},
        step=2,
        format=Format(style="torch"),
    )
    assert verify(tmp_path / "c") == []
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    resumed = MultiStepLR(again, milestones=[9])
    report = load(tmp_path / "c", model=other, optimizer=again, scheduler=resumed)
    assert (report.extra, report.step, report.missing, report.unexpected) == ({"seen": 7}, 2, (), ())
    assert resumed.state_dict() == scheduler.state_dict()
    assert train(other, again, range(2, 5)) == train(model, optimizer, range(2, 5))


def test_an_optimizer_that_has_not_stepped(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style="torch"))
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    load(tmp_path / "c", model=other, optimizer=again)
    assert train(other, again, range(3)) == train(model, optimizer, range(3))


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt"])
def test_a_flipped_byte_is_found(file, tmp_path):
    model, optimizer, _ = trained()
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style="torch"))
    path = tmp_path / "c" / file
    data = bytearray(path.read_bytes())
    value = (model[0].weight if file == "model.pt" else optimizer.state[model[0].weight]["exp_avg"]).detach()
    at = data.find(bytes(value.view(-1)[:4].view(torch.uint8).tolist()))
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    assert len(verify(tmp_path / "c")) == 1
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters())
    with pytest.raises(CorruptError, match=file):
        load(tmp_path / "c", model=other, optimizer=again)


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(4)
def test_shards_meet_in_one_file_and_go_elsewhere(tmp_path):
    for source in ("tensor", "zero1", "strided"):
        run = RUNS[source]()
        run.steps(range(1))
        path = tmp_path / f"{source}{run.ranks[0]}"
        save(path, model=run.model, optimizer=run.optimizer, group=run.group, format=Format(style="torch"))
        before = run.whole()
        state = torch.load(path / "model.pt", weights_only=True)
        assert all(torch.equal(value, before[name]) for name, value in state.items())
        for target in ("one", "zero3", "strided"):
            other = RUNS[target](seed=3)
            dist.barrier()
            load(tmp_path / f"{source}0", model=other.model, optimizer=other.optimizer, group=other.group)
            after = other.whole()
            assert all(torch.equal(value, before[name]) for name, value in after.items()), (source, target)


def test_ties_strangely_aligned_and_empty_tensors_come_back(tmp_path):
    odd = torch.arange(7.0)[1:6]
    weights = {
        "a": torch.arange(5, dtype=torch.uint8),
        "view": odd,
        "b": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "c": torch.arange(6).view(2, 3).t(),
        "z": torch.tensor([1 + 2j]),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    weights["tied"] = weights["view"]
    save(tmp_path / "c", model=weights, format=Format(style="torch"))
    local = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in weights.items()}
    load(tmp_path / "c", model=local)
    assert all(torch.equal(local[name], each) for name, each in weights.items())


def test_a_file_whose_list_was_changed_is_refused_before_anything_changes(tmp_path):
    """Though the data is not compared with checksums, what tells where it lies always is."""
    save(tmp_path / "c", model={"name": torch.arange(5.0)}, format=Format(style="torch"))
    data = (tmp_path / "c" / "model.pt").read_bytes()
    (tmp_path / "c" / "model.pt").write_bytes(data.replace(b"name", b"game"))
    local = {"game": torch.zeros(5)}
    with pytest.raises(CorruptError, match=r"block 0 of .*model\.pt"):
        load(tmp_path / "c", model=local, verify="off")
    assert not local["game"].any()


@pytest.mark.ranks(2)
def test_each_byte_is_read_once_by_all_together(tmp_path, monkeypatch):
    """Of a file of several blocks, the two that torch keeps its list in are looked at once more, by the first rank."""
    torch.manual_seed(0)
    weights = {"w": torch.randn(3000, 1001), "v": torch.randn(123)}
    save(tmp_path / "c", model=weights, format=Format(style="torch"))
    mesh = init_device_mesh(default_device_type(), (2,))
    local = {name: distribute_tensor(torch.zeros_like(each), mesh, [Shard(0)]) for name, each in weights.items()}
    asked, whole = [], LocalSource.read_into
    monkeypatch.setattr(
        LocalSource, "read_into", lambda self, begin, view: asked.append(len(view)) or whole(self, begin, view)
    )
    load(tmp_path / "c", model=local)
    assert all(torch.equal(local[name].full_tensor(), each) for name, each in weights.items())
    size = (tmp_path / "c" / "model.pt").stat().st_size
    read = torch.tensor(sum(asked))
    dist.all_reduce(read)
    assert size <= read.item() < size + 3 * BLOCK


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
def test_files_are_dealt_out_to_the_ranks(tmp_path):
    mesh = init_device_mesh(default_device_type(), (2,))
    model = fully_shard(make_model(), mesh=mesh)
    save(tmp_path / "c", model=model, format=Format(style="torch"))
    state = torch.load(tmp_path / "c" / "model.pt", weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in make_model().state_dict().items())
    assert json.loads((tmp_path / "c" / "par_checkpoint.json").read_text())["style"] == "torch"


def test_writing_into_memory_looks_only_at_the_tensors_it_meets():
    class Watched(list):
        seen = 0

        def __iter__(self):
            Watched.seen += 1
            return super().__iter__()

    memory = [bytearray(size) for size in (3, 0, 4, 2)]
    parts = Watched(zip((10, 13, 13, 17), map(memoryview, memory), strict=True))
    writer = _MemoryWriter(parts)
    for begin, data in ((8, b"01"), (10, b"2"), (11, b"3456"), (15, b"789"), (18, b"ab")):
        writer.write_at(begin, memoryview(data))
    assert memory == [b"234", b"", b"5678", b"9a"]
    assert Watched.seen == 1


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("copy", ["blocking", "background"])
def test_it_is_written_in_the_background_and_holds_the_values_of_the_call(tmp_path, copy):
    model, optimizer, scheduler = trained()
    cut = dist.get_rank() * 3
    layout = {"w": Sharding((6, 5), (Box((cut, 0), (3, 5), 0, (5, 1), (dist.get_rank(),)),))}
    part = nn.Parameter(torch.arange(30.0).view(6, 5)[cut : cut + 3].clone())
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    opened, write = threading.Event(), saving.write_objects
    with mock.patch.object(saving, "write_objects", lambda *args: opened.wait(240) and write(*args)):
        tensors = {**dict(model.named_parameters()), "w": part}
        handle = save(
            tmp_path / "c",
            model=tensors,
            optimizer=optimizer,
            scheduler=scheduler,
            async_=True,
            format=Format(style="torch", layout=layout),
            transfer=Transfer(copy=copy),
        )
        handle.wait_for_copy()
        train(model, optimizer, range(2, 4))
        part.data.zero_()
        dist.barrier()
        assert not handle.done()
        assert not (tmp_path / "c").exists()
        opened.set()
        handle.wait()
    found = torch.load(tmp_path / "c" / "model.pt", weights_only=True)
    assert torch.equal(found.pop("w"), torch.arange(30.0).view(6, 5))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert verify(tmp_path / "c") == []
