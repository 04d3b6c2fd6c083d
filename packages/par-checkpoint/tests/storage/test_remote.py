import builtins
import sys
import uuid

import pytest
import torch.distributed as dist

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.manifest import Manifest, encode_manifest
from par_checkpoint.storage.folder import open_folder

EMPTY = encode_manifest(
    Manifest(style="huggingface", files={}, tied={}, model=None, optimizer=None, scheduler=None, extra=None)
)


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path):
    """The URL of a folder of this test's own."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}"


def save(folder, nonce="n1", **files):
    staging = folder.stage(nonce)
    staging.create(files, 0)
    staging.attach()
    for name, data in files.items():
        staging.write(f"{name}.model", data)
    staging.write("par_checkpoint.json", EMPTY)
    staging.publish(overwrite=True)


def test_what_is_streamed_is_read_back(root):
    folder = open_folder(f"{root}/run")
    staging = folder.stage("n1")
    staging.create(["a", "optimizer/b"], 10**18)
    staging.attach()
    assert not staging.positional
    writer = staging.writer("optimizer/b")
    writer.write_at(0, memoryview(b"0123"))
    writer.write_at(4, memoryview(b"4567"))
    writer.finish()
    writer.abort()
    staging.write("a", b"xyz")
    assert not folder.exists()
    staging.publish(overwrite=False)
    assert folder.exists()
    assert folder.sizes() == {"a": 3, "optimizer/b": 8}
    assert folder.read("a") == b"xyz"
    assert folder.read("optimizer/b", 2, 6) == b"2345"
    assert open_folder(root).folders() == ["run"]
    assert open_folder(root).child("run").read("a", 1) == b"yz"


def test_a_stream_has_no_gaps(root):
    folder = open_folder(f"{root}/run")
    staging = folder.stage("n1")
    staging.create(["a"], 0)
    writer = staging.writer("a")
    writer.write_at(0, memoryview(b"01"))
    with pytest.raises(ValueError, match="byte 3 cannot follow 2"):
        writer.write_at(3, memoryview(b"34"))
    writer.abort()
    with pytest.raises(TypeError, match="written from beginning to end, by one rank"):
        staging.allocate("a", 3)
    staging.discard()
    staging.discard()
    assert open_folder(root).folders() == []


def test_short_and_missing_files_are_named(root):
    folder = open_folder(f"{root}/run")
    save(folder, a=b"0123")
    with pytest.raises(CorruptError, match=r"run/a\.model ends at byte 4, but bytes to 6"):
        folder.read("a.model", 2, 6)
    with pytest.raises(CorruptError, match="run/c is missing"):
        folder.open("c")
    with pytest.raises(CheckpointError, match=r"there is no folder .*/other: check the path"):
        open_folder(f"{root}/other").sizes()


def test_an_interrupted_replacement_is_read_from_where_it_was_gathered_and_ended_by_the_next_save(root):
    class Died(Exception):
        pass

    def die(step):
        if step == "copied a.model":
            raise Died

    save(open_folder(f"{root}/run"), a=b"old", b=b"old")
    with pytest.raises(Died):
        save(open_folder(f"{root}/run", die), "n2", a=b"new", b=b"new")
    reader = open_folder(f"{root}/run")
    reader.recover()
    assert reader.read("a.model") == reader.read("b.model") == b"new"
    assert reader.sizes().keys() == {"a.model", "b.model", "par_checkpoint.json"}
    assert sorted(open_folder(root).folders()) == [".run.tmp-n2", "run"]
    assert reader.sweep(dry_run=True) == reader.sweep() == []
    assert open_folder(root).folders() == ["run"]
    reader.recover()
    assert reader.read("a.model") == reader.read("b.model") == b"new"
    save(open_folder(f"{root}/run"), "n3", a=b"newest", b=b"newest")
    reader.recover()
    assert reader.read("a.model") == b"newest"
    assert open_folder(root).folders() == ["run"]


def test_a_dry_sweep_tells_what_a_sweep_removes(root):
    folder = open_folder(f"{root}/run")
    save(folder, a=b"a")
    folder.stage("n2").create(["a"], 0)
    told = folder.sweep(dry_run=True)
    assert [path.rpartition("/")[2] for path in told] == [".run.tmp-n2"]
    assert folder.sweep() == told
    assert folder.sweep() == []
    assert folder.read("a.model") == b"a"


def test_removing_leaves_nothing(root):
    folder = open_folder(f"{root}/run")
    save(folder, a=b"a")
    folder.remove()
    assert not folder.exists()
    assert open_folder(root).folders() == []


def test_a_bucket_itself_is_no_target():
    with pytest.raises(ValueError, match="save to a folder below it"):
        open_folder("memory://").stage("n1")


def test_without_fsspec_the_remedy_is_told(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError(f"No module named {name!r}", name="fsspec")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "par_checkpoint.storage.remote", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"s3://bucket/run needs fsspec, which is not installed: pip install fsspec"):
        open_folder("s3://bucket/run")


@pytest.mark.ranks(2)
def test_memory_is_not_shared_by_ranks():
    staging = open_folder("memory://shared/run").stage("n1")
    if dist.get_rank() == 0:
        staging.create(["a"], 0)
        staging.attach()
    else:
        with pytest.raises(CheckpointError, match="not visible on this rank"):
            staging.attach()
