"""Folders that were damaged, or that strangers wrote: readers raise a typed error, or give what is there."""

import contextlib
import copy
import json
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import par_checkpoint as pc
from par_checkpoint.format.manifest import head_of
from par_checkpoint.tools.convert import convert_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123\n"

NASTY = [
    *(None, True, -1, 0, 2**63, 2**200, 1.5, "", "x", "../x", "\ud800", "a" * 300, [], {}, [[]], {"a": 1}),
    *({"$tensor": "a"}, {"$tuple": 3}, {"$set": [[1]]}, {"$dict": [[[], 1]]}, {"$range": [1, 2, 0]}, {"$size": [-1]}),
    *({"$dtype": "Tensor"}, {"$device": 3}, {"$path": "a\0b"}, {"$int": "0x" + "f" * 6000}, {"$complex": [1]}),
    *({"$number": ["int64", 2**70]}, {"$ranks": []}, {"$ranks": 3}, {"$nope": 1}, {"$ordered_dict": 3}),
]


def parts():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind that is read."""
    root = tmp_path_factory.mktemp("sound")
    state = parts()
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    for style in ("huggingface", "torch"):
        pc.save(
            root / style,
            extra={"a": torch.ones(2), "b": (1, 2.5)},
            format=pc.Format(style=style, config={"a": 1}),
            **state,
        )
    weights = state["model"].state_dict()
    pc.save(
        root / "shards",
        model={name: each.clone() for name, each in weights.items()},
        format=pc.Format(max_shard_size=20),
    )
    for name in ("hf", "bin", "old"):
        (root / name).mkdir()
    save_file(weights, root / "hf" / "model.safetensors")
    torch.save(weights, root / "bin" / "pytorch_model.bin")
    torch.save(weights, root / "old" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return root


def places(value, path=()):
    """The paths of all values within one."""
    yield path
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*path, key))


def changed(value, chance):
    """A JSON object of which something is another value, is gone, or is new."""
    value = copy.deepcopy(value)
    *above, last = chance.choice([path for path in places(value) if path])
    at = value
    for key in above:
        at = at[key]
    kind = chance.random()
    if kind < 0.2:
        del at[last]
    elif kind < 0.4 and isinstance(at, dict):
        at[chance.choice(["x", "params", "$tuple", "\udcff"])] = copy.deepcopy(chance.choice(NASTY))
    else:
        at[last] = copy.deepcopy(chance.choice(NASTY))
    return value


def flipped(data, chance):
    """Bytes of which some are others, gone, or more."""
    kind, data = chance.random(), bytearray(data)
    at = chance.randrange(len(data))
    if kind < 0.5:
        data[at] ^= 1 << chance.randrange(8)
    elif kind < 0.7:
        data = data[:at]
    elif kind < 0.9:
        data[at : at + chance.randrange(20)] = chance.randbytes(chance.randrange(20))
    else:
        data = bytearray(chance.choice([b"", POINTER, chance.randbytes(100)]))
    return bytes(data)


def damage(folder, chance):
    """Damages one file of a folder."""
    path = chance.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    data, kind = path.read_bytes(), chance.random()
    if kind < 0.1:
        path.unlink()
        if kind < 0.06:
            path.symlink_to("gone" if kind < 0.03 else path.name)
        elif kind < 0.07:
            path.mkdir()
    elif path.suffix == ".json" and kind < 0.8:
        fields = json.loads(data)
        is_sealed = fields.pop("checksum", None) is not None
        rest = json.dumps(changed(fields, chance)).encode()
        path.write_bytes(head_of(b", " + rest[1:]) + b", " + rest[1:] if is_sealed else rest)
    elif path.suffix == ".safetensors" and kind < 0.6:
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(changed(json.loads(data[8 : 8 + size]), chance)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    else:
        path.write_bytes(flipped(data, chance))


READERS = (
    lambda folder: pc.load(folder, **parts()),
    lambda folder: pc.load(folder, model=nn.Linear(3, 3), strict=False, verify="full"),
    lambda folder: pc.load(f"file://{folder}", model=nn.Linear(3, 3), strict=False),
    pc.verify,
    pc.inspect,
    lambda folder: convert_checkpoint(str(folder), f"{folder}-new", to="huggingface"),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_readers_of_damaged_folders_raise_typed_errors(folders, tmp_path, seed):
    chance = random.Random(seed)
    for number in range(12):
        kind = chance.choice(sorted(each.name for each in folders.iterdir()))
        folder = tmp_path / f"{number}-{kind}"
        shutil.copytree(folders / kind, folder)
        damage(folder, chance)
        for act in READERS:
            with contextlib.suppress(pc.CheckpointError):
                act(folder)


def test_a_pointer_of_git_lfs_in_place_of_a_small_file_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(pc.CorruptError, match=r"index\.json: is a pointer of Git LFS, in whose place `git lfs pull`"):
        pc.load(tmp_path / "a", model=nn.Linear(3, 3))
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(pc.CorruptError, match=r"tokenizer\.json: is a pointer of Git LFS"):
        pc.save(tmp_path / "b", model={"w": torch.ones(2)}, format=pc.Format(assets=[tmp_path / "tokenizer.json"]))
    assert not (tmp_path / "b").exists()


def test_links_in_a_circle_are_as_missing_as_others(tmp_path):
    for name, target in (("dangling", "gone"), ("circle", "model.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").symlink_to(target)
        for path in (tmp_path / name, f"file://{tmp_path}/{name}"):
            with pytest.raises(pc.CheckpointError, match=r"model\.safetensors"):
                pc.load(path, model=nn.Linear(3, 3))


def test_a_name_that_no_file_system_takes_is_no_folder(tmp_path):
    for name in ("a" * 300, "a" * 5000):
        with pytest.raises(pc.CheckpointError, match="there is no folder"):
            pc.load(tmp_path / name, model=nn.Linear(3, 3))
        assert pc.latest(tmp_path / name) is None


def test_a_file_of_torch_save_under_another_name_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "a" / "model.safetensors")
    with pytest.raises(pc.CorruptError, match=r"is a file of torch.save; use the name pytorch_model.bin for it"):
        pc.load(tmp_path / "a", model=nn.Linear(3, 3))


def test_a_folder_of_dcp_without_metadata_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "__0_0.distcp").write_bytes(b"x")
    for act in (
        lambda: pc.load(tmp_path / "a", model=nn.Linear(3, 3)),
        lambda: convert_checkpoint(str(tmp_path / "a"), str(tmp_path / "b"), to="huggingface"),
    ):
        with pytest.raises(pc.CheckpointError, match="else its save has not ended, or the file is on another host"):
            act()
