"""Files of strangers: what they claim is never believed, links lead nothing astray, and only ours is removed."""

import dataclasses
import io
import json
import os
import pathlib
import pickle
import sys
import tracemalloc
import zipfile

import pytest
import torch
import torch.distributed as dist
from crc32c import crc32c
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import par_checkpoint as pc
from par_checkpoint.tools.convert import convert_checkpoint
from par_checkpoint.tools.dcp import _Unpickler

MANIFEST = "par_checkpoint.json"
INDEX = "model.safetensors.index.json"
FILE = "model.safetensors"


def model():
    return {"w": torch.ones(3, 4)}


def refused(path, match, kind=pc.CorruptError):
    """Loading and looking are refused, and nothing has changed."""
    into = {"w": torch.zeros(3, 4)}
    with pytest.raises(kind, match=match):
        pc.load(path, model=into)
    with pytest.raises(kind, match=match):
        pc.inspect(path)
    assert not into["w"].any()


def header_file(path, text, data=bytes(48)):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def sealed(path, fields):
    """A manifest whose own checksum is right."""
    lines = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in fields)
    body = f",\n{lines}}}\n".encode()
    (path / MANIFEST).write_bytes(b'{"checksum": "%08x"' % crc32c(body) + body)


def fields_of(path):
    fields = json.loads((path / MANIFEST).read_bytes())
    del fields["checksum"]
    return {name: json.dumps(value) for name, value in fields.items()}


def listed(path):
    return sorted(each.name for each in path.iterdir())


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("claimed", [100_000_001, 1 << 32, (1 << 64) - 1])
def test_a_header_that_claims_too_much_is_refused_without_reading_it(tmp_path, claimed):
    with (tmp_path / FILE).open("wb") as file:
        file.write(claimed.to_bytes(8, "little"))
        file.truncate(200_000_000)
    tracemalloc.start()
    try:
        refused(tmp_path, "must be 2 to 100000000 and fit the file")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_a_manifest_cannot_claim_a_longer_header(tmp_path):
    path = tmp_path / "c"
    pc.save(path, model=model())
    fields = fields_of(path)
    files = json.loads(fields["files"])
    files[FILE] |= {"size": 200_000_000, "data_begin": 150_000_000}
    files[FILE]["crcs"] = "00000000" * -(-50_000_000 // files[FILE]["block"])
    os.truncate(path / FILE, 200_000_000)
    sealed(path, [*{**fields, "files": json.dumps(files)}.items()])
    refused(path, "from 150000000 on do not fit")


W = b'"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}'


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"{" + W + b"," + W + b"}", "twice|duplicate"),
        (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested|does not have exactly"),
        (b'{"w":{"dtype":"F32","dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}', "twice|duplicate"),
        (b"{" + W + b"," + W.replace(b'"w"', b'"v"') + b"}", "bytes|overlap"),
    ],
)
def test_a_header_of_duplicates_nests_or_overlaps_is_refused(tmp_path, header, match):
    header_file(tmp_path / FILE, header)
    refused(tmp_path, match)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "twice|duplicate"),
        ('{"weight_map": {}, "weight_map": {"w": "a.safetensors"}}', "twice|duplicate"),
        ('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested|no map"),
    ],
)
def test_an_index_of_duplicates_or_nests_is_refused(tmp_path, index, match):
    save_file(model(), tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, match)


@pytest.mark.parametrize("name", ["../secret.safetensors", "{}/secret.safetensors", "sub/x.safetensors", "..", ""])
def test_an_index_names_only_files_beside_it(tmp_path, name):
    save_file(model(), tmp_path / "secret.safetensors")
    (tmp_path / "c" / "sub").mkdir(parents=True)
    save_file(model(), tmp_path / "c" / "sub" / "x.safetensors")
    for index in (INDEX, "pytorch_model.bin.index.json"):
        (tmp_path / "c" / index).write_text(json.dumps({"weight_map": {"w": name.format(tmp_path)}}))
        refused(tmp_path / "c", "only plain names")
        (tmp_path / "c" / index).unlink()


def test_a_manifest_names_only_files_below_it(tmp_path):
    path = tmp_path / "c"
    pc.save(path, model=model())
    fields = fields_of(path)
    record = json.loads(fields["files"])[FILE]
    (tmp_path / "secret").write_bytes((path / FILE).read_bytes())
    (path / "unknown").touch()
    absolute = str(tmp_path / "secret")
    for name in ("../secret", absolute, "optimizer/../../secret", "optimizer//secret", "a/b", ".hidden"):
        sealed(path, [*{**fields, "files": json.dumps({FILE: record, name: record})}.items()])
        refused(path, "no plain name")
        assert "no plain name" in pc.verify(path)[0]
        with pytest.raises(pc.CheckpointError, match=r"unknown\. Nothing was changed"):
            pc.save(path, model=model(), overwrite=True)
    assert (tmp_path / "secret").exists()


def test_a_manifest_of_duplicates_or_nests_is_refused(tmp_path):
    path = tmp_path / "c"
    pc.save(path, model=model())
    fields = fields_of(path)
    sealed(path, [*fields.items()])
    pc.load(path, model=model())
    sealed(path, [*fields.items(), ("style", '"huggingface"')])
    refused(path, "twice|duplicate")
    sealed(path, [*{**fields, "extra": "[" * 100_000 + "]" * 100_000}.items()])
    refused(path, "nested")


def test_linked_files_are_read(tmp_path):
    pc.save(tmp_path / "blobs", model=model(), extra={"t": torch.arange(3)}, format=pc.Format(config={"a": 1}))
    (tmp_path / "snapshot").mkdir()
    for each in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / each.name).symlink_to(f"../blobs/{each.name}")
    into = {"w": torch.zeros(3, 4)}
    assert pc.load(tmp_path / "snapshot", model=into, verify="full").extra["t"].tolist() == [0, 1, 2]
    assert torch.equal(into["w"], model()["w"])
    (tmp_path / "link").symlink_to("snapshot")
    assert pc.verify(tmp_path / "link") == []
    (tmp_path / "blobs" / FILE).unlink()
    refused(tmp_path / "snapshot", "link to a file that is missing")


@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_overwriting_linked_files_leaves_what_they_point_to(tmp_path, style):
    blobs = tmp_path / "blobs"
    pc.save(blobs, model=model(), format=pc.Format(style=style, config={"a": 1}))
    before = {each.name: each.read_bytes() for each in blobs.iterdir()}
    (tmp_path / "run").mkdir()
    for name in before:
        (tmp_path / "run" / name).symlink_to(f"../blobs/{name}")
    pc.save(
        tmp_path / "run", model={"w": torch.zeros(3, 4)}, overwrite=True, format=pc.Format(style=style, config={"a": 2})
    )
    assert {each.name: each.read_bytes() for each in blobs.iterdir()} == before
    assert not any(each.is_symlink() for each in (tmp_path / "run").iterdir())
    assert json.loads((tmp_path / "run" / "config.json").read_bytes()) == {"a": 2}


def test_a_target_that_is_a_link_is_never_written(tmp_path):
    pc.save(tmp_path / "real", model=model())
    (tmp_path / "run").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = {each.name: each.read_bytes() for each in (tmp_path / "real").iterdir()}
    for name in ("run", "dangling"):
        with pytest.raises(FileExistsError, match="overwrite=True"):
            pc.save(tmp_path / name, model=model())
        with pytest.raises(pc.CheckpointError, match="a link or a file, which is never replaced"):
            pc.save(tmp_path / name, model=model(), overwrite=True)
    assert {each.name: each.read_bytes() for each in (tmp_path / "real").iterdir()} == before
    assert listed(tmp_path) == ["dangling", "real", "run"]


def test_a_linked_folder_inside_is_neither_followed_nor_removed(tmp_path):
    path = tmp_path / "root" / "step-00000001"
    pc.save(path, model=model())
    pc.save(tmp_path / "root" / "step-00000002", model=model())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "optimizer-00001-of-00001.safetensors").touch()
    (path / "optimizer").symlink_to("../../precious")
    with pytest.raises(pc.CheckpointError, match=r"optimizer\. Nothing was changed"):
        pc.save(path, model=model(), overwrite=True)
    assert pc.prune(tmp_path / "root", keep_last=1) == []
    assert len(listed(tmp_path / "precious")) == 1


def test_links_that_look_like_what_a_save_left_are_not_followed(tmp_path):
    pc.save(tmp_path / "precious", model=model())
    for kind in ("tmp", "old"):
        (tmp_path / f".run.{kind}-abc").symlink_to("precious")
    with pytest.raises(pc.CheckpointError, match="there is no folder"):
        pc.load(tmp_path / "run", model=model())
    pc.save(tmp_path / "run", model=model())
    pc.save(tmp_path / "run", model=model(), overwrite=True)
    assert pc.verify(tmp_path / "precious") == []
    assert (tmp_path / ".run.old-abc").is_symlink()


def test_deflated_entries_are_refused(tmp_path):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "stored")
    with (
        zipfile.ZipFile(tmp_path / "stored") as old,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 100_000
    refused(tmp_path, "is compressed", pc.CheckpointError)


def vouch_for(path, **more):
    """Makes the manifest agree with a model.pt that was replaced."""
    data = (path / "model.pt").read_bytes()
    fields = fields_of(path)
    files = json.loads(fields["files"])
    files["model.pt"] |= {"size": len(data), "crcs": f"{crc32c(data):08x}", "data_begin": 0, **more}
    sealed(path, [*{**fields, "files": json.dumps(files)}.items()])


@pytest.mark.filterwarnings("ignore:(Sparse|Validating sparse).* invariant:UserWarning")  # not by torch 2.13
def test_tensors_of_torch_style_lie_in_their_file_one_after_the_other(tmp_path):
    path = tmp_path / "c"
    pc.save(path, model=model(), format=pc.Format(style="torch"))
    whole = (path / "model.pt").read_bytes()
    numel = b"K\x0ct"  # 12 elements of a storage, in the pickle
    assert whole.count(numel) == 1
    (path / "model.pt").write_bytes(whole.replace(numel, b"K\xf0t").replace(b"K\x03K\x04\x86", b"K\x3cK\x04\x86"))
    vouch_for(path)
    refused(path, "at bytes .* of", pc.CorruptError)
    (path / "model.pt").write_bytes(whole)
    vouch_for(path, data_begin=64, header_crc=f"{crc32c(whole[:64]):08x}")
    refused(path, "said to begin at byte 64", pc.CorruptError)
    for odd in (torch.zeros(4, 3).t(), torch.zeros(1).expand(3, 4), torch.zeros(3, 4).to_sparse()):
        torch.save({"w": odd}, path / "model.pt")
        vouch_for(path)
        refused(path, "is not contiguous", pc.CheckpointError)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_pickles_is_never_run(tmp_path, zipped):
    path, mark = tmp_path / "c", tmp_path / "mark"
    path.mkdir()
    evil = {"w": Evil(mark)}
    torch.save(evil, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    refused(path, "would run code", pc.CheckpointError)
    pc.save(tmp_path / "ours", model=model(), format=pc.Format(style="torch"))
    torch.save(evil, tmp_path / "ours" / "model.pt", _use_new_zipfile_serialization=zipped)
    vouch_for(tmp_path / "ours")
    why = "would run code" if zipped else "is a broken zip file"
    [wrong] = pc.verify(tmp_path / "ours")
    assert why in wrong
    refused(tmp_path / "ours", why, pc.CheckpointError)
    assert not mark.exists()


@pytest.mark.parametrize("broken", [False, True])
def test_code_in_the_metadata_of_dcp_is_never_run(tmp_path, broken):
    data = b"\x80\x04X" if broken else pickle.dumps(Evil(tmp_path / "hacked"))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    with pytest.raises(pc.CheckpointError, match="cannot be read" if broken else "might run code"):
        convert_checkpoint(str(tmp_path / "dcp"), str(tmp_path / "new"), to="huggingface")
    assert not (tmp_path / "hacked").exists()
    assert not (tmp_path / "new").exists()


def dcp_folder(path):
    """A folder of torch.distributed.checkpoint, and its metadata."""
    save_dcp({"model": model()}, checkpoint_id=path, no_dist=True)
    return pickle.loads((path / ".metadata").read_bytes())


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_dcp_of_every_python_is_read(tmp_path, monkeypatch, module):
    """Python 3.13 has the class of paths, one of which is in the metadata, in a module of its own."""
    metadata = dcp_folder(tmp_path / "dcp")
    assert isinstance(metadata.storage_meta.checkpoint_id, pathlib.Path)
    with monkeypatch.context() as patch:
        patch.setattr(type(metadata.storage_meta.checkpoint_id), "__module__", module)
        patch.setitem(sys.modules, module, pathlib)
        data = pickle.dumps(metadata)
    assert (b"pathlib._local" in data) == (module == "pathlib._local")
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    convert_checkpoint(str(tmp_path / "dcp"), str(tmp_path / "new"), to="huggingface")
    assert torch.equal(pc.read_tensor(tmp_path / "new", "w"), model()["w"])


class Taken:
    """What Python 3.11.0 to 3.11.3 writes for a member of an enumeration: `getattr`, its class and its name."""

    def __init__(self, kind, name):
        self.taken = kind, name

    def __reduce__(self):
        return getattr, self.taken


def test_dcp_members_of_enumerations_are_read_and_nothing_else_is_taken_by_name():
    member = next(iter(_MEM_FORMAT_ENCODING))
    data = pickle.dumps(Taken(_MEM_FORMAT_ENCODING, member.name))
    assert b"getattr" in data
    assert _Unpickler(io.BytesIO(data)).load() is member
    for kind, name in ((_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")):
        with pytest.raises(pc.CheckpointError, match="never does, so it might run code"):
            _Unpickler(io.BytesIO(pickle.dumps(Taken(kind, name)))).load()


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["../secret.distcp", "{}/secret.distcp", ""])
def test_dcp_names_only_files_beside_its_metadata(tmp_path, name):
    metadata = dcp_folder(tmp_path / "dcp")
    for index, info in metadata.storage_data.items():
        (tmp_path / "secret.distcp").write_bytes((tmp_path / "dcp" / info.relative_path).read_bytes())
        metadata.storage_data[index] = dataclasses.replace(info, relative_path=name.format(tmp_path))
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pc.CheckpointError, match="which is not beside it"):
        convert_checkpoint(str(tmp_path / "dcp"), str(tmp_path / "new"), to="huggingface")


def test_prune_removes_only_real_step_directories_with_our_manifest(tmp_path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for step in (1, 2, 3, 4, 9):
        pc.save(root / f"step-{step:08d}", model=model())
    pc.save(elsewhere, model=model())
    (root / "step-00000005").symlink_to("../elsewhere")
    (root / "step-00000006").mkdir()
    (root / "step-00000006" / FILE).touch()
    (root / "step-00000007").write_text("a file")
    (root / "step-00000002" / "notes.txt").write_text("mine")
    data = (root / "step-00000003" / MANIFEST).read_bytes()
    (root / "step-00000003" / MANIFEST).write_bytes(data[:-3] + b"0}\n")
    for name in ("step-8", "step-00000008-best", "best"):
        pc.save(root / name, model=model())
    before = listed(root)
    removed = [str(root / "step-00000004"), str(root / "step-00000001")]
    assert pc.prune(root, keep_last=1, dry_run=True) == removed
    assert listed(root) == before
    assert pc.prune(root, keep_last=1) == removed
    assert set(before) - set(listed(root)) == {"step-00000001", "step-00000004"}
    assert pc.verify(elsewhere) == []
    assert (root / "step-00000002" / "notes.txt").read_text() == "mine"


@pytest.mark.ranks(2)
def test_the_first_rank_alone_decides_what_is_latest(tmp_path):
    rank = dist.get_rank()
    root = tmp_path / str(rank)
    group = dist.new_group([rank], use_local_synchronization=True)
    for step in (1, 2) if rank == 0 else (1, 2, 3):
        pc.save(root / f"step-{step:08d}", model=model(), group=group)
    assert pc.latest(root) == str(tmp_path / "0" / "step-00000002")
    assert pc.latest(root, group=group) == str(root / f"step-0000000{2 + rank}")
