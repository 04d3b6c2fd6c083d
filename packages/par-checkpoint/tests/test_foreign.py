"""Folders that somebody else wrote, or damaged, and what others make of ours."""

import json
import struct
import zipfile

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from par_checkpoint import CheckpointError, CorruptError, Format, load, save
from par_groups import Box, Sharding, bytes_of

INDEX = "model.safetensors.index.json"


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def copies(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def write_shards(path, state, parts=3):
    """A folder as transformers writes it."""
    path.mkdir(parents=True, exist_ok=True)
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    weight_map = {name: files[i % parts] for i, name in enumerate(state)}
    for file in files:
        save_file({name: state[name] for name, where in weight_map.items() if where == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return files


def write_by_hand(path, tensors):
    """A legal file in any order: contiguous, but not aligned as our own and safetensors' writer would have it."""
    header, data = {}, b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def raw(tensor):
    return bytes(bytes_of(tensor.contiguous()))


def rewrite(path, change):
    """Changes the JSON of an index."""
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


# What is wrong with a folder, each made from sound shards or from a sound single file


def a_file_is_truncated(path, state):
    file = path / write_shards(path, state)[1]
    file.write_bytes(file.read_bytes()[:-3])


def a_header_is_truncated(path, state):
    file = path / write_shards(path, state)[2]
    file.write_bytes(file.read_bytes()[:20])


def a_file_is_empty(path, state):
    (path / write_shards(path, state)[0]).write_bytes(b"")


def a_file_is_too_long(path, state):
    file = path / write_shards(path, state)[0]
    file.write_bytes(file.read_bytes() + b"\0\0\0\0")


def a_file_is_missing(path, state):
    (path / write_shards(path, state)[1]).unlink()


def the_index_is_broken(path, state):
    write_shards(path, state)
    (path / INDEX).write_text((path / INDEX).read_text()[:-5])


def the_index_knows_a_tensor_that_is_not_there(path, state):
    files = write_shards(path, state)
    rewrite(path / INDEX, lambda index: index["weight_map"].update(more=files[0]))


def the_index_does_not_know_a_tensor(path, state):
    write_shards(path, state)
    rewrite(path / INDEX, lambda index: index["weight_map"].pop("1.bias"))


def the_index_leads_out_of_the_folder(path, state):
    write_shards(path / "inner", state)
    write_shards(path, state)
    rewrite(
        path / INDEX, lambda index: index["weight_map"].update({"1.bias": f"inner/{index['weight_map']['1.bias']}"})
    )


def a_tensor_is_in_two_files(path, state):
    files = write_shards(path, state)
    save_file({**load_file(path / files[0]), "0.bias": state["0.bias"]}, path / files[0])


def a_stale_single_file_is_beside_shards(path, state):
    write_shards(path, state)
    save_file(state, path / "model.safetensors")


def two_tensors_overlap(path, state):
    write_by_hand(
        path / "model.safetensors", {name: ("F32", list(each.shape), raw(each)) for name, each in state.items()}
    )
    text = (path / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", text[:8])[0]
    header = json.loads(text[8 : 8 + size])
    header["0.bias"]["data_offsets"] = header["1.bias"]["data_offsets"]
    changed = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(changed)) + changed + text[8 + size :])


def a_pickle_is_deflated(path, state):
    torch.save(state, path / "stored.bin")
    with (
        zipfile.ZipFile(path / "stored.bin") as stored,
        zipfile.ZipFile(path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as deflated,
    ):
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))


def a_pickle_runs_code(path, state):
    torch.save({**state, "bang": RunsCode()}, path / "pytorch_model.bin")


def a_pickle_is_truncated(path, state):
    torch.save(state, path / "pytorch_model.bin")
    data = (path / "pytorch_model.bin").read_bytes()
    (path / "pytorch_model.bin").write_bytes(data[: len(data) // 2])


def a_pickle_holds_more_than_tensors(path, state):
    torch.save({"model": state, "step": 3}, path / "pytorch_model.bin")


def a_pickled_shard_is_missing(path, state):
    torch.save(state, path / "pytorch_model-00001-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 + (name == '1.bias')}-of-00002.bin" for name in state}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def a_pickled_shard_lacks_a_tensor(path, state):
    torch.save(
        {name: each for name, each in state.items() if name != "1.bias"}, path / "pytorch_model-00001-of-00001.bin"
    )
    weight_map = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def a_tensor_in_a_pickled_shard_is_not_in_the_index(path, state):
    torch.save({**state, "stale": torch.ones(2)}, path / "pytorch_model-00001-of-00001.bin")
    weight_map = dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def there_are_no_weights(path, state):
    (path / "config.json").write_text("{}")


def the_folder_is_empty(path, state):
    pass


def another_variant_is_there(path, state):
    save_file(state, path / "model.fp16.safetensors")


class RunsCode:
    """Unpickled without care, it would end the process."""

    def __reduce__(self):
        return exit, (3,)


CORRUPT = {
    a_file_is_truncated: "model-00002-of-00003.safetensors",
    a_header_is_truncated: "model-00003-of-00003.safetensors",
    a_file_is_empty: "model-00001-of-00003.safetensors",
    a_file_is_too_long: "model-00001-of-00003.safetensors",
    a_file_is_missing: "model-00002-of-00003.safetensors: is missing",
    the_index_is_broken: INDEX,
    the_index_knows_a_tensor_that_is_not_there: r"'more' is in model-00001-of-00003.safetensors, but it is not there",
    the_index_does_not_know_a_tensor: r"does not say that '1.bias' is in",
    the_index_leads_out_of_the_folder: "names the file 'inner/",
    a_tensor_is_in_two_files: r"does not say that '0.bias' is in",
    two_tensors_overlap: "model.safetensors",
    a_pickle_is_truncated: "pytorch_model.bin",
    a_pickled_shard_is_missing: "pytorch_model-00002-of-00002.bin: is missing",
    a_pickled_shard_lacks_a_tensor: "'1.bias' is in pytorch_model-00001-of-00001.bin, but it is not there",
    a_tensor_in_a_pickled_shard_is_not_in_the_index: "does not say that 'stale' is in",
}
REFUSED = {
    a_stale_single_file_is_beside_shards: "has both model.safetensors and model.safetensors.index.json",
    a_pickle_is_deflated: "is compressed",
    a_pickle_runs_code: "would run code",
    a_pickle_holds_more_than_tensors: "not a tensor under a name",
    there_are_no_weights: "no weights under any of these names: .*It has: config.json",
    the_folder_is_empty: "no folder|no weights",
    another_variant_is_there: "or their variant",
}


def check_that_loading_raises(path, kind, text, model):
    before = copies(model)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(path, model=model)
    assert type(caught.value) is kind, caught.value
    assert "undefined" not in str(caught.value)
    assert_equal(copies(model), before)


@pytest.mark.parametrize("damage", [*CORRUPT, *REFUSED])
def test_a_broken_folder_changes_nothing(damage, tmp_path):
    damage(tmp_path, copies(build()))
    kind = CorruptError if damage in CORRUPT else CheckpointError
    check_that_loading_raises(tmp_path, kind, {**CORRUPT, **REFUSED}[damage], build(1))


@pytest.mark.cpu(reason="writes its file from memory of the host")
@pytest.mark.ranks(2)
def test_a_broken_folder_changes_nothing_on_any_rank(tmp_path):
    for damage, text in {**CORRUPT, **REFUSED}.items():
        path = tmp_path / damage.__name__
        if dist.get_rank() == 0:
            path.mkdir()
            damage(path, copies(build()))
        dist.barrier()
        check_that_loading_raises(path, CorruptError if damage in CORRUPT else CheckpointError, text, build(1))


@pytest.mark.ranks(2)
def test_what_one_rank_misses_is_listed_on_all(tmp_path):
    state, rank = copies(build()), dist.get_rank()
    if rank == 0:
        write_shards(tmp_path / "c", state)
    dist.barrier()
    mine = {f"only.{rank}": torch.zeros(3), "0.bias": torch.zeros(9), "1.bias": torch.zeros(8, dtype=torch.float16)}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model=mine)
    for text in ("only.0", "only.1", "not wanted by anybody: 2.weight", "'0.bias' is torch.float32 (8,)", "(9,)"):
        assert text in str(caught.value)
    assert "'1.bias' is torch.float32 (8,) in the checkpoint, torch.float16 (8,) in the model" in str(caught.value)
    assert all(not tensor.any() for tensor in mine.values())
    report = load(tmp_path / "c", model=mine, strict=False)
    assert report.missing == ("only.0", "only.1")
    assert set(report.unexpected) == set(state) - {"0.bias", "1.bias"}
    assert len(report.mismatched) == 2
    assert not mine["0.bias"].any()


def test_without_strict_what_fits_is_loaded(tmp_path):
    state = copies(build())
    del state["1.bias"]
    state["more"] = torch.ones(2)
    write_shards(tmp_path, state)
    model = build(1)
    before = copies(model)
    report = load(tmp_path, model=model, strict=False)
    assert (report.missing, report.unexpected, report.mismatched) == (("1.bias",), ("more",), ())
    del state["more"]
    assert_equal(copies(model), {**state, "1.bias": before["1.bias"]})


def test_dtypes_are_cast_only_when_asked(tmp_path):
    state = copies(build())
    state["2.bias"] = state["2.bias"].double()
    write_shards(tmp_path, {**state, "0.weight": state["0.weight"].bfloat16()})
    model = build(1)
    check_that_loading_raises(
        tmp_path,
        CheckpointError,
        r"(?s)'0.weight' is torch.bfloat16 .*'2.bias' is torch.float64|'2.bias'.*'0.weight'",
        model,
    )
    load(tmp_path, model=model, dtype=torch.float32)
    assert_equal(copies(model), {**copies(build()), "0.weight": state["0.weight"].bfloat16().float()})


def test_pickles_are_cast_too(tmp_path):
    state = copies(build().half())
    torch.save(state, tmp_path / "pytorch_model.bin")
    model = build(1)
    check_that_loading_raises(tmp_path, CheckpointError, "torch.float16", model)
    load(tmp_path, model=model, dtype=torch.float32)
    assert_equal(copies(model), {name: each.float() for name, each in state.items()})


def test_tensors_that_are_not_aligned_load_right(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "after": torch.randn(5, 3),
        "flag": torch.tensor([True, False, True]),
        "large": torch.randn(1100, 1001),  # more than one block
        "half": torch.randn(3, dtype=torch.bfloat16),
        "long": torch.arange(4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    kinds = dict(zip(tensors, ["U8", "F32", "BOOL", "F32", "BF16", "I64", "F64", "F32"], strict=True))
    write_by_hand(
        tmp_path / "model.safetensors",
        {name: (kinds[name], list(each.shape), raw(each)) for name, each in tensors.items()},
    )
    local = {name: torch.zeros_like(each) for name, each in tensors.items()}
    load(tmp_path, model=local)
    assert_equal(local, tensors)
    cast = {
        name: torch.zeros_like(each, dtype=torch.float32) if each.is_floating_point() else torch.zeros_like(each)
        for name, each in tensors.items()
    }
    load(tmp_path, model=cast, dtype=torch.float32)
    assert_equal(cast, {name: each.float() if each.is_floating_point() else each for name, each in tensors.items()})


@pytest.mark.cpu(reason="writes its file from memory of the host")
@pytest.mark.ranks(3)
def test_tensors_that_are_not_aligned_load_right_in_columns(tmp_path):
    rank, width = dist.get_rank(), 350
    torch.manual_seed(0)
    whole = {"odd": torch.arange(7, dtype=torch.uint8), "w": torch.randn(1500, 3 * width)}
    if rank == 0:
        write_by_hand(
            tmp_path / "model.safetensors",
            {"odd": ("U8", [7], raw(whole["odd"])), "w": ("F32", [1500, 3 * width], raw(whole["w"]))},
        )
    dist.barrier()
    box = Box((0, width * rank), (1500, width), 0, (width, 1), (rank,))
    local = {"odd": torch.zeros(7, dtype=torch.uint8), "w": torch.zeros(1500, width)}
    load(tmp_path, model=local, format=Format(layout={"w": Sharding((1500, 3 * width), (box,))}))
    assert_equal(local, {"odd": whole["odd"], "w": whole["w"][box.slices]})


@pytest.mark.ranks(2)
def test_pickles_are_cut_like_any_other_file(tmp_path):
    state, rank = copies(build()), dist.get_rank()
    if rank == 0:
        torch.save(state, tmp_path / "pytorch_model.bin")
    dist.barrier()
    box = Box((0, 3 * rank), (8, 3), 0, (3, 1), (rank,))
    local = {name: torch.zeros_like(each) for name, each in state.items()}
    local["0.weight"] = torch.zeros(8, 3)
    load(tmp_path, model=local, format=Format(layout={"0.weight": Sharding((8, 6), (box,))}))
    assert_equal(local, {**state, "0.weight": state["0.weight"][box.slices]})


def test_tied_weights_load_from_files_with_either_name_or_both(tmp_path):
    def tied(seed):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        model[1].weight = model[0].weight
        return model

    state = copies(tied(0))
    for number, left_out in enumerate(("0.weight", "1.weight", None)):
        path = tmp_path / str(number)
        path.mkdir()
        for write in (
            lambda each, file: save_file(each, file / "model.safetensors"),
            lambda each, file: torch.save(each, file / "pytorch_model.bin"),
        ):
            for file in path.iterdir():
                file.unlink()
            write({name: each.clone() for name, each in state.items() if name != left_out}, path)
            model = tied(1)
            load(path, model=model)
            assert_equal(copies(model), state)
            assert model[0].weight is model[1].weight


@pytest.mark.parametrize("pickled", [False, True])
def test_tied_weights_that_differ_in_the_files_are_refused(pickled, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    state = copies(model)
    state["1.weight"] += 1
    if pickled:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    check_that_loading_raises(tmp_path, CheckpointError, "are one tensor in the model, but differ", model)


def test_links_are_followed(tmp_path):
    """The cache of the Hugging Face hub is made of them."""
    state = copies(build())
    (tmp_path / "snapshot").mkdir()
    for file in write_shards(tmp_path / "blobs", state):
        (tmp_path / "snapshot" / file).symlink_to(tmp_path / "blobs" / file)
    (tmp_path / "snapshot" / INDEX).symlink_to(tmp_path / "blobs" / INDEX)
    model = build(1)
    load(tmp_path / "snapshot", model=model)
    assert_equal(copies(model), state)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            "version https://git-lfs.github.com/spec/v1\nsize 9\n",
            "is a pointer of Git LFS to weights; use",
        ),
        ("<!DOCTYPE html><html><body>Please log in</body></html>", "is a web page, such as a login or an error; use"),
        ("<html>404</html>", "is a web page"),
    ],
)
def test_load_names_what_came_instead_of_weights(name, first, words, tmp_path):
    (tmp_path / name).write_text(first)
    with pytest.raises(CorruptError, match=rf"{name} {words}"):
        load(tmp_path, model={"w": torch.zeros(1)})


def test_load_of_a_file_names_its_folder(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"this is a file; pass its folder, '{tmp_path}'"):
        load(tmp_path / "model.safetensors", model={"w": torch.zeros(1)})


def test_a_dangling_link_matters_only_if_it_is_needed(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tf_model.h5").symlink_to(tmp_path / "nowhere")
    into = {"w": torch.zeros(1)}
    load(tmp_path, model=into)
    assert into["w"] == 1
    (tmp_path / "model.safetensors").rename(tmp_path / "other")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorruptError, match=r"model\.safetensors is a link to a file that is missing: fetch it again"):
        load(tmp_path, model=into)
    save(tmp_path / "ours", model=into)
    (tmp_path / "ours" / "par_checkpoint.json").unlink()
    (tmp_path / "ours" / "par_checkpoint.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorruptError, match=r"par_checkpoint\.json is a link to a file that is missing"):
        load(tmp_path / "ours", model=into)


def test_a_foreign_folder_has_no_optimizer_and_no_checksums(tmp_path):
    write_shards(tmp_path, copies(build()))
    model = build(1)
    with pytest.raises(CheckpointError, match="no optimizer state; pass no optimizer"):
        load(tmp_path, model=model, optimizer=torch.optim.Adam(model.parameters()))
    load(tmp_path, model=model, verify="full")
    assert_equal(copies(model), copies(build()))


def trained(seed=0):
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_torch_opens_files_in_torch_style(tmp_path):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    save(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra={"epoch": 2},
        format=Format(style="torch"),
    )
    found = {name: torch.load(tmp_path / f"c/{name}.pt", weights_only=True) for name in ("model", "optimizer", "extra")}
    assert list(found["model"]) == list(model.state_dict())
    assert_equal(found["model"], copies(model))
    assert found["extra"] == {"epoch": 2}
    assert found["optimizer"]["param_groups"][0]["params"] == list(model.state_dict())
    assert found["optimizer"]["param_groups"][0]["lr"] == 1e-2
    for name, parameter in model.named_parameters():
        assert_equal(found["optimizer"]["state"][name], optimizer.state[parameter])
    other = build(1)
    other.load_state_dict(found["model"])
    assert_equal(copies(other), copies(model))


@pytest.mark.cpu(reason="compares with a file read on the host")
@pytest.mark.ranks(2)
def test_torch_style_holds_whole_tensors(tmp_path):
    state, rank = copies(build()), dist.get_rank()
    box = Box((0, 3 * rank), (8, 3), 0, (3, 1), (rank,))
    layout = {"0.weight": Sharding((8, 6), (box,))}
    local = {**state, "0.weight": state["0.weight"][box.slices].clone()}
    save(tmp_path / "c", model=local, format=Format(style="torch", layout=layout))
    assert_equal(torch.load(tmp_path / "c/model.pt", weights_only=True), state)
    model = build(1)
    model.load_state_dict(torch.load(tmp_path / "c/model.pt", weights_only=True))
    assert_equal(copies(model), state)
    again = {name: torch.zeros_like(each) for name, each in local.items()}
    load(tmp_path / "c", model=again, format=Format(layout=layout))
    assert_equal(again, local)


def test_torch_style_keeps_tied_weights_tied(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save(tmp_path / "c", model=model, format=Format(style="torch"))
    found = torch.load(tmp_path / "c/model.pt", weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    load(tmp_path / "c", model=other)  # untied: both names are in the file
    assert_equal(copies(other), copies(model))


def test_any_state_dict_in_a_pt_file_loads(tmp_path):
    state = copies(build())
    torch.save(state, tmp_path / "model.pt")
    model = build(1)
    load(tmp_path, model=model)
    assert_equal(copies(model), state)


def test_safetensors_opens_ours(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(max_shard_size=100))
    weight_map = json.loads((tmp_path / "c" / INDEX).read_text())["weight_map"]
    assert list(weight_map) == sorted(model.state_dict())
    for name, file in weight_map.items():
        assert torch.equal(load_file(tmp_path / "c" / file)[name], model.state_dict()[name])
    slots = {
        name: each
        for file in (tmp_path / "c/optimizer").glob("*.safetensors")
        for name, each in load_file(file).items()
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(slots[f"{name}.exp_avg"], optimizer.state[parameter]["exp_avg"])
