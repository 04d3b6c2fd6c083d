import builtins
import sys
import uuid

import pytest
import torch.distributed as dist

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.manifest import Manifest, encode_manifest, record_of
from par_checkpoint.storage.folder import open_folder


@pytest.fixture(params=["memory", "file"])
def root(request, tmp_path):
    """The URL of a folder of this test's own."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}"


def begun(folder, nonce="n1"):
    staging = folder.stage(nonce)
    staging.create([], 10**18)
    staging.attach(staging.invite())
    return staging


def manifest_of(generation, files):
    records = {name: record_of(data, 1 << 22) for name, data in files.items()}
    return encode_manifest(
        Manifest(
            style="huggingface",
            files=records,
            tied={},
            model=None,
            optimizer=None,
            scheduler=None,
            extra=None,
            beside={"config.json": record_of(generation.removeprefix("generation-").encode(), 1 << 22)},
            generation=generation,
        )
    )


def save(folder, nonce="n1", index=None, **files):
    staging = begun(folder, nonce)
    files = {f"{name}.safetensors": data for name, data in files.items()}
    for name, data in files.items():
        staging.write(name, data)
    staging.write("config.json", nonce.encode())
    staging.write("par_checkpoint.json", manifest_of(f"generation-{nonce}", files))
    staging.publish(overwrite=True, index=index)


def test_what_is_streamed_is_read_back(root):
    folder = open_folder(f"{root}/run")
    staging = begun(folder)
    assert not staging.positional
    writer = staging.writer("optimizer/b")
    writer.write_at(0, memoryview(b"0123"))
    writer.write_at(4, memoryview(b"4567"))
    writer.finish()
    writer.abort()
    staging.write("config.json", b"xyz")
    staging.write("par_checkpoint.json", manifest_of("generation-n1", {"optimizer/b": b"01234567"}))
    folder.recover()
    assert not folder.exists()
    staging.publish(overwrite=False)
    assert folder.exists()
    assert folder.sizes().items() >= {"config.json": 3, "optimizer/b": 8}.items()
    assert folder.read("config.json") == b"xyz"
    assert folder.read("optimizer/b", 2, 6) == b"2345"
    assert open_folder(root).folders() == ["run"]
    assert open_folder(root).child("run").read("config.json", 1) == b"yz"


def test_a_stream_has_no_gaps(root):
    folder = open_folder(f"{root}/run")
    staging = begun(folder)
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
    with pytest.raises(CorruptError, match=r"/a\.safetensors ends at byte 4, but bytes to 6"):
        folder.read("a.safetensors", 2, 6)
    with pytest.raises(CorruptError, match="run/c is missing"):
        folder.open("c")
    with pytest.raises(CheckpointError, match=r"there is no folder .*/other: check the path"):
        open_folder(f"{root}/other").sizes()


def paths_in(folder):
    return sorted(folder.store.objects(folder.path))


def test_the_manifest_decides_between_generations_and_a_sweep_puts_the_rest_right(root):
    """A saver that dies right after its manifest: what transformers opens is still the old one, then the new one."""

    class Died(Exception):
        pass

    def die(step):
        if step == "committed":
            raise Died

    index = ("model.safetensors.index.json", b"generation-n1/a")
    save(open_folder(f"{root}/run"), model=b"old", b=b"old", index=index)
    with pytest.raises(Died):
        save(open_folder(f"{root}/run", die), "n2", model=b"new", b=b"new", index=(index[0], b"generation-n2/a"))
    reader = open_folder(f"{root}/run")
    assert reader.read("model.safetensors") == reader.read("b.safetensors") == b"new"
    assert reader.sizes().keys() == {"model.safetensors", "b.safetensors", "config.json", "par_checkpoint.json"}
    assert reader.store.get(f"{reader.path}/{index[0]}") == index[1]
    assert reader.store.get(f"{reader.path}/config.json") == b"n1"
    assert reader.store.get(f"{reader.path}/generation-n1/model.safetensors") == b"old"
    swept = [f"{reader.path}/generation-n1"]
    assert reader.sweep(dry_run=True) == swept
    assert reader.sweep() == swept
    assert reader.sweep() == []
    assert reader.store.get(f"{reader.path}/{index[0]}") == b"generation-n2/a"
    assert reader.store.get(f"{reader.path}/config.json") == b"n2"
    assert {path.partition("/")[0] for path in paths_in(reader) if "/" in path} == {"generation-n2"}
    assert reader.read("model.safetensors") == reader.read("b.safetensors") == b"new"
    save(open_folder(f"{root}/run"), "n3", model=b"newest", b=b"newest")
    reader.recover()
    assert reader.read("model.safetensors") == b"newest"


def test_a_save_that_never_put_its_manifest_is_invisible_and_swept_with_what_it_showed(root):
    folder = open_folder(f"{root}/run")
    staging = begun(folder, "n2")
    for name in ("a.safetensors", "config.json"):
        staging.write(name, b"a")
    folder.store.put(f"{folder.path}/config.json", b"a")
    folder.store.put(f"{folder.path}/model.safetensors.index.json", b"generation-n2/a")
    folder.recover()
    assert not folder.exists()
    folder.check_target(overwrite=False)
    assert folder.sweep() == [f"{folder.path}/generation-n2"]
    assert paths_in(folder) == []


def test_what_others_have_put_there_is_not_swept_with_a_dead_save(root):
    folder = open_folder(f"{root}/run")
    folder.store.put(f"{folder.path}/config.json", b"mine")
    folder.store.put(f"{folder.path}/model.safetensors", b"mine")
    begun(folder, "n2").write("config.json", b"a")
    assert folder.sweep() == [f"{folder.path}/generation-n2"]
    assert paths_in(folder) == ["config.json", "model.safetensors"]


def test_a_save_whose_files_another_one_swept_fails_and_leaves_the_old(root):
    folder, other = open_folder(f"{root}/run"), open_folder(f"{root}/run")
    save(folder, a=b"old")
    staging = begun(folder, "n2")
    staging.write("a.safetensors", b"new")
    other.sweep()
    staging.write("par_checkpoint.json", manifest_of("generation-n2", {"a.safetensors": b"new"}))
    with pytest.raises(CheckpointError, match="another save to the same place has removed it"):
        staging.publish(overwrite=True)
    staging.discard()
    assert folder.read("a.safetensors") == b"old"
    assert folder.sweep() == []


def test_removing_leaves_nothing(root):
    folder = open_folder(f"{root}/run")
    save(folder, a=b"a", index=("model.safetensors.index.json", b"generation-n1/a"))
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
        staging.attach(staging.invite())
    else:
        with pytest.raises(CheckpointError, match="not visible on this rank"):
            staging.attach({})
