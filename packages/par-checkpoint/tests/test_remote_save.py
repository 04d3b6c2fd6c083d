"""Checkpoints through fsspec, and files that one rank writes from beginning to end."""

import contextlib
import io
import itertools
import json
import sys
import uuid
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import (
    CheckpointError,
    CorruptError,
    Format,
    Transfer,
    inspect,
    latest,
    load,
    prune,
    read_tensor,
    save,
    verify,
)
from par_groups import Box, Sharding

fsspec = pytest.importorskip("fsspec")

BLOCK = 4 << 20


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 60))


def trained(seed=0):
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer, seed=0):
    model(torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copies(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def files_of(url):
    fs, path = fsspec.core.url_to_fs(url)
    return sorted(each.removeprefix(path).lstrip("/") for each in fs.find(path))


def data_of(url):
    """The names of the files of the one generation at a URL, as they are in it."""
    names = [each.partition("/") for each in files_of(url)]
    assert len({first for first, _, rest in names if rest}) == 1
    return sorted({rest for _, _, rest in names} - {"", "par_checkpoint.index.json"})


def place_of(fs, path, name):
    """The path of a file of the one generation below a path."""
    [found] = [each for each in fs.find(path) if each.endswith(f"/{name}") and "/generation-" in each]
    return found


def flip(url, position):
    """Changes one byte of a file."""
    fs, path = fsspec.core.url_to_fs(url)
    path = place_of(fs, *path.rsplit("/", 1))
    data = bytearray(fs.cat_file(path))
    data[position] ^= 1
    fs.pipe_file(path, bytes(data))


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path):
    """A URL that nobody else uses."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}"


@pytest.fixture(params=["huggingface", "torch"])
def style(request):
    """How it is stored."""
    return request.param


def model_file(style):
    return "model.pt" if style == "torch" else "model.safetensors"


@pytest.mark.parametrize("writer", ["auto", "owner"])
def test_what_is_saved_is_loaded(root, style, writer):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"epoch": 3, "noise": torch.arange(5)}
    url = f"{root}/c"
    save(
        url,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra=extra,
        step=7,
        format=Format(style=style),
        transfer=Transfer(writer=writer),
    )
    assert verify(url) == []
    other = build(1)
    others = torch.optim.AdamW(other.parameters(), lr=1)
    report = load(url, model=other, optimizer=others, scheduler=torch.optim.lr_scheduler.StepLR(others, 9))
    assert report.step == 7
    assert report.extra["epoch"] == 3
    assert torch.equal(report.extra["noise"], torch.arange(5))
    assert_equal(copies(other), copies(model))
    step(model, optimizer, 1)
    step(other, others, 1)
    assert_equal(copies(other), copies(model))


def test_positional_writes_need_a_local_path(root):
    with pytest.raises(ValueError, match="pwrite"):
        save(f"{root}/c", model=build(), transfer=Transfer(writer="pwrite"))
    assert files_of(root) == []


def test_a_folder_is_replaced_only_when_asked(root, style):
    """Also by one of the other style."""
    url = f"{root}/c"
    save(url, model=build(), format=Format(max_shard_size="6KB"))
    many = data_of(url)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save(url, model=build(1), format=Format(style=style))
    assert data_of(url) == many
    save(url, model=build(2), overwrite=True, format=Format(style=style))
    assert model_file(style) in data_of(url)
    assert not set(data_of(url)) & {name for name in many if "-of-" in name or "index" in name}
    assert files_of(root) == [f"c/{name}" for name in files_of(url)]  # nothing is left beside it
    model = build(3)
    load(url, model=model)
    assert_equal(copies(model), copies(build(2)))


def test_a_config_is_carried_over_and_what_is_not_ours_stays(root, style):
    url = f"{root}/c"
    save(url, model=build(), format=Format(style=style, config={"model_type": "mine"}))
    save(url, model=build(1), overwrite=True, format=Format(style=style))
    assert "config.json" in files_of(url)
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{path}/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save(url, model=build(2), overwrite=True, format=Format(style=style))
    model = build(3)
    fs.rm_file(f"{path}/notes.txt")
    load(url, model=model)
    assert_equal(copies(model), copies(build(1)))


def test_a_flipped_byte_is_found(root, style):
    url, weights = f"{root}/c", {"w": torch.arange(3.0 * BLOCK // 4)}
    save(url, model=weights, format=Format(style=style))
    name = model_file(style)
    flip(f"{url}/{name}", 3 * BLOCK // 2)
    [line] = verify(url)
    assert f"{name}' (from byte " in line
    assert "It holds parts of 'w'" in line
    local = zeros_like(weights)
    with pytest.raises(CorruptError, match=r"Nothing was changed"):
        load(url, model=local, verify="full")
    assert not local["w"].any()
    with pytest.raises(CorruptError, match=rf"block 1 of '.*{name}'.*undefined"):
        load(url, model=local)


def test_a_flipped_byte_in_the_directory_of_a_file_is_found_before_anything_changes(root, style):
    url, weights = f"{root}/c", {"w": torch.arange(3.0 * BLOCK // 4)}
    save(url, model=weights, format=Format(style=style))
    flip(f"{url}/{model_file(style)}", -60 if style == "torch" else 20)
    local = zeros_like(weights)
    with pytest.raises(CorruptError, match=model_file(style)):
        load(url, model=local)
    assert not local["w"].any()
    assert len(verify(url)) == 1


def test_a_folder_of_others_loads(root, tmp_path):
    """Without a manifest, from shards and an index that somebody uploaded."""
    save(tmp_path / "local", model=build(), format=Format(max_shard_size="6KB"))
    fs, path = fsspec.core.url_to_fs(f"{root}/c")
    fs.makedirs(path)
    for file in (tmp_path / "local").glob("model*"):
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    assert "model.safetensors.index.json" in files_of(f"{root}/c")
    model = build(1)
    load(f"{root}/c", model=model)
    assert_equal(copies(model), copies(build()))
    fs.rm_file(f"{path}/model-00001-of-00003.safetensors")
    with pytest.raises(CorruptError, match=r"model-00001-of-00003\.safetensors: is missing"):
        load(f"{root}/c", model=model)


def test_a_missing_folder_and_a_missing_file_are_named(root, style):
    with pytest.raises(CheckpointError, match="there is no folder"):
        load(f"{root}/c", model=build())
    save(f"{root}/c", model=build(), format=Format(style=style, max_shard_size="6KB"))
    fs, path = fsspec.core.url_to_fs(f"{root}/c")
    name = "model.pt" if style == "torch" else "model-00002-of-00003.safetensors"
    fs.rm_file(place_of(fs, path, name))
    with pytest.raises(CorruptError, match=f"{name} is missing"):
        load(f"{root}/c", model=build())


def test_a_slice_is_read_without_the_rest_of_its_file(root, style):
    """Nothing but the ends of the file, where torch keeps its list of what is in it, and the bytes themselves."""
    url, weights = f"{root}/c", {f"w{i}": torch.arange(i, i + BLOCK // 4).view(-1, 64) for i in range(6)}
    save(url, model=weights, optimizer=None, extra=torch.arange(3), step=4, format=Format(style=style))
    contents = inspect(url)
    assert (contents.style, contents.step, contents.extra.tolist()) == (style, 4, [0, 1, 2])
    assert {name: place.shape for name, place in contents.tensors.items()} == dict.fromkeys(weights, (BLOCK // 256, 64))
    with counted(url) as asked:
        found = read_tensor(url, "w3", Box((7, 3), (20, 9), 0, (9, 1), ()))
    assert torch.equal(found, weights["w3"][7:27, 3:12])
    assert sum(asked) < 4 * BLOCK  # of 12


@contextlib.contextmanager
def counted(url):
    """The bytes that each request for a part of a file asks for."""
    kind, asked = type(fsspec.core.url_to_fs(url)[0]), []
    whole = kind.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        data = whole(self, path, start=start, end=end, **options)
        asked.append(len(data))
        return data

    with mock.patch.object(kind, "cat_file", cat_file):
        yield asked


def test_steps_are_found_and_pruned(root, style):
    assert latest(root) is None
    for number in (5, 10, 15, 20):
        save(f"{root}/step-{number:08}", model=build(number), step=number, format=Format(style=style))
    newest = latest(root)
    assert newest.endswith("step-00000020")
    model = build()
    assert load(newest, model=model).step == 20
    assert_equal(copies(model), copies(build(20)))
    removed = prune(root, keep_last=1, keep_every=10)
    assert sorted(each[-2:] for each in removed) == ["05", "15"]
    assert {name.partition("/")[0] for name in files_of(root)} == {"step-00000010", "step-00000020"}


def test_a_save_in_the_background_streams_too(root, style):
    model = build()
    handle = save(f"{root}/c", model=model, async_=True, format=Format(style=style, max_shard_size="6KB"))
    expected = copies(model)
    with torch.no_grad():
        model[0].weight.zero_()
    handle.wait()
    load(f"{root}/c", model=model)
    assert_equal(copies(model), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_many_blocks_go_into_one_stream_in_order(root, style, dtype):
    """With several threads, the second block must not overtake the first."""
    weights = {f"w{i}": torch.arange(i, i + BLOCK // 4 + 37, dtype=torch.float32) for i in range(5)}
    for threads in (1, 4):
        save(
            f"{root}/c",
            model=weights,
            overwrite=True,
            format=Format(style=style, dtype=dtype),
            transfer=Transfer(threads=threads),
        )
        local = {name: torch.zeros_like(each, dtype=dtype) for name, each in weights.items()}
        load(f"{root}/c", model=local)
        assert_equal(local, {name: each.to(dtype) for name, each in weights.items()})


def columns(rank, size, rows=460):
    """A matrix of more than one block, cut by columns, a vector that all hold, and the layout."""
    torch.manual_seed(0)
    width = 2304 // size
    whole = {"w": torch.randn(rows, width * size), "v": torch.randn(700), "u": torch.randn(300, 5)}
    box = Box((0, width * rank), (rows, width), 0, (width, 1), (rank,))
    local = {**whole, "w": whole["w"][box.slices].clone()}
    return whole, local, {"w": Sharding((rows, width * size), (box,))}


def zeros_like(tensors):
    return {name: torch.zeros_like(each) for name, each in tensors.items()}


def check_that_owners_write(url, shard_size):
    whole, local, layout = columns(dist.get_rank(), dist.get_world_size())
    for writer, style in itertools.product(("auto", "owner"), ("huggingface", "torch")):
        save(
            url,
            model=local,
            overwrite=True,
            format=Format(style=style, max_shard_size=shard_size, layout=layout),
            transfer=Transfer(writer=writer),
        )
        assert verify(url) == []
        for wanted, by in ((local, layout), (whole, None)):
            again = zeros_like(wanted)
            load(url, model=again, format=Format(layout=by))
            assert_equal(again, wanted)
        dist.barrier()


@pytest.mark.ranks(2)
def test_two_ranks_write_through_fsspec(tmp_path):
    for size in ("2KB", "5GB"):
        check_that_owners_write(f"file://{tmp_path}/c", size)
    whole, local, layout = columns(dist.get_rank(), 2)
    with pytest.raises(FileExistsError):
        save(f"file://{tmp_path}/c", model=local, format=Format(layout=layout))
    handle = save(f"file://{tmp_path}/d", model=local, async_=True, format=Format(layout=layout))
    handle.wait()
    again = zeros_like(whole)
    load(f"file://{tmp_path}/d", model=again)
    assert_equal(again, whole)


@pytest.mark.ranks(2)
def test_two_ranks_agree_on_the_latest_step(tmp_path):
    for number in (1, 2, 3):
        save(f"file://{tmp_path}/step-{number:08}", model=build(number), step=number)
    assert latest(f"file://{tmp_path}").endswith("step-00000003")
    dist.barrier()
    if dist.get_rank() == 0:
        assert len(prune(f"file://{tmp_path}", keep_last=1)) == 2
    dist.barrier()
    model = build()
    assert load(latest(f"file://{tmp_path}"), model=model, group=None).step == 3
    assert_equal(copies(model), copies(build(3)))


@pytest.mark.ranks(4)
def test_owners_write_to_a_local_path(tmp_path):
    for size in ("2KB", "5GB"):
        check_that_owners_write(str(tmp_path / "c"), size)
    whole, local, layout = columns(dist.get_rank(), 4)
    save(
        tmp_path / "d",
        model=local,
        format=Format(max_shard_size="2KB", layout=layout),
        transfer=Transfer(writer="pwrite"),
    )
    save(
        tmp_path / "e",
        model=local,
        format=Format(max_shard_size="2KB", layout=layout),
        transfer=Transfer(writer="owner"),
    )
    for file in (tmp_path / "d").iterdir():
        assert file.read_bytes() == (tmp_path / "e" / file.name).read_bytes(), file.name
    again = zeros_like(whole)
    load(tmp_path / "e", model=again)
    assert_equal(again, whole)


@pytest.mark.ranks(2)
def test_an_error_of_one_owner_reaches_all_and_leaves_the_old(tmp_path):
    url = f"file://{tmp_path}/c"
    save(url, model=build())
    fs = fsspec.filesystem("file")
    if dist.get_rank() == 1:
        opened = type(fs).open
        fs.open = lambda path, mode="rb", **settings: full() if mode == "wb" else opened(fs, path, mode, **settings)
    for style in ("huggingface", "torch"):
        # in torch style rank 0 writes the model, and rank 1 the optimizer
        model, optimizer = trained(1)
        with pytest.raises(OSError, match="No space left"):
            save(
                url, model=model, optimizer=optimizer, overwrite=True, format=Format(style=style, max_shard_size="6KB")
            )
        dist.barrier()
    assert files_of(f"file://{tmp_path}") == [f"c/{name}" for name in files_of(url)]
    model = build(2)
    load(url, model=model)
    assert_equal(copies(model), copies(build()))


def full():
    raise OSError(28, "No space left on device")


def pickle_there(url, tensors, **options):
    """Puts there what torch.save writes."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    data = io.BytesIO()
    torch.save(tensors, data, **options)
    fs.pipe_file(path, data.getvalue())


@pytest.mark.parametrize("parts", [1, 2])
def test_pickles_of_others_load(root, parts):
    weights = copies(build())
    weights["rows"] = weights["0.weight"][7:]  # in the memory of another one
    names = [f"pytorch_model-{n}.bin" for n in range(parts)] if parts > 1 else ["pytorch_model.bin"]
    files = {key: names[i * parts // len(weights)] for i, key in enumerate(weights)}
    for name in names:
        pickle_there(f"{root}/c/{name}", {key: each for key, each in weights.items() if files[key] == name})
    fs, path = fsspec.core.url_to_fs(f"{root}/c")
    if parts > 1:
        fs.pipe_file(f"{path}/pytorch_model.bin.index.json", json.dumps({"weight_map": files}).encode())
    local = zeros_like(weights)
    load(f"{root}/c", model=local)
    assert_equal(local, weights)
    assert torch.equal(
        read_tensor(f"{root}/c", "rows", Box((2, 3), (4, 5), 0, (5, 1), (0,))), weights["rows"][2:6, 3:8]
    )
    assert set(inspect(f"{root}/c").tensors) == set(weights)
    if parts > 1:
        files["rows"] = names[0]
        fs.pipe_file(f"{path}/pytorch_model.bin.index.json", json.dumps({"weight_map": files}).encode())
        with pytest.raises(CorruptError, match=r"says that 'rows' is in pytorch_model-0\.bin, but it is not there"):
            load(f"{root}/c", model=local)


def test_pickles_that_cannot_be_read_in_place_are_read_from_local_disks_only(root, monkeypatch):
    weights = copies(build())
    pickle_there(f"{root}/old/pytorch_model.bin", weights, _use_new_zipfile_serialization=False)
    pickle_there(f"{root}/turned/pytorch_model.bin", {"w": torch.ones(3, 4).T})
    pickle_there(f"{root}/c/pytorch_model.bin", weights)
    if root.startswith("file:"):
        for name, wanted in (("old", weights), ("turned", {"w": torch.ones(4, 3)})):
            local = zeros_like(wanted)
            load(f"{root}/{name}", model=local)
            assert_equal(local, wanted)
        return
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is no zip file, .* is read from local disks only"):
        load(f"{root}/old", model=zeros_like(weights))
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(4, 3\) that is not contiguous"):
        load(f"{root}/turned", model={"w": torch.zeros(4, 3)})
    fs, path = fsspec.core.url_to_fs(f"{root}/cut/pytorch_model.bin")
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, fs.cat_file(path.replace("/cut/", "/c/"))[:-100])
    with pytest.raises(CorruptError, match=r"pytorch_model.bin: is a broken zip file"):
        load(f"{root}/cut", model=zeros_like(weights))
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin has another byte order"):
        load(f"{root}/c", model=zeros_like(weights))
