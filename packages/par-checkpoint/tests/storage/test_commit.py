"""A process is killed after every step of a commit; then the old or the new is there, whole."""

import os
import signal

import pytest

from par_checkpoint._errors import CheckpointError
from par_checkpoint.format.manifest import Manifest, encode_manifest, record_of
from par_checkpoint.storage.commit import exchange
from par_checkpoint.storage.folder import open_folder
from par_checkpoint.storage.local import LocalFolder

from ..forks import forked

STEPS = {
    "exchange": {"swept", "leased", "created", "made", "linked", "synced-staging", "exchanged", "synced", "removed"},
    "renames": {
        "swept",
        "leased",
        "created",
        "made",
        "linked",
        "synced-staging",
        "renamed-old",
        "renamed-new",
        "synced",
    }
    | {"retired", "removed"},
    "remote": {"swept", "begun", "committed", "removed"},
}


def opened(kind, path, at=lambda _: None):
    if kind == "remote":
        return open_folder(f"file://{path}", at)
    return LocalFolder(str(path), at=at, exchange=kind == "exchange", patience=60)


def save(folder, nonce, *, foreign=False, overwrite=True, files=None):
    """Writes a small checkpoint whose every file tells the nonce."""
    data = files or {"model.safetensors": nonce, "optimizer/optimizer-00001-of-00001.safetensors": nonce}
    data = {name: text.encode() for name, text in data.items()}
    staging = folder.stage(nonce)
    if foreign:
        data = {"model.safetensors": b"foreign", "pytorch_model.bin": b"foreign", "config.json": b"{}"}
        if staging.generation:
            for name, each in data.items():
                folder.store.put(f"{folder.path}/{name}", each)
            return
    else:
        records = {name: record_of(each, 1 << 20) for name, each in data.items()}
        empty = {"model": None, "optimizer": None, "scheduler": None, "extra": nonce}
        empty["generation"] = staging.generation
        data["par_checkpoint.json"] = encode_manifest(Manifest(style="huggingface", files=records, tied={}, **empty))
    staging.create(data, sum(len(each) for each in data.values()))
    staging.attach(staging.invite())
    for name, each in data.items():
        staging.write(name, each)
    staging.publish(overwrite=overwrite)
    staging.close()


def content(folder):
    return {name: folder.read(name) for name in folder.sizes()} if folder.exists() else None


def entries(path):
    return sorted(entry.name for entry in path.iterdir())


def killed(act):
    """Whether a child that does this is killed."""
    with forked() as child:
        if not child:
            act()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    return None


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kind", "before"),
    [
        ("exchange", "nothing"),
        pytest.param("renames", "nothing", marks=pytest.mark.storm),  # nothing is there to be exchanged or renamed
        ("remote", "nothing"),
        pytest.param("exchange", "ours", marks=pytest.mark.storm),  # foreign has all that this has
        ("renames", "ours"),
        ("remote", "ours"),
        ("exchange", "foreign"),
        pytest.param("renames", "foreign", marks=pytest.mark.storm),
        ("remote", "foreign"),
    ],
)
def test_at_any_kill_the_old_or_the_new_is_whole(tmp_path, kind, before):
    if kind == "exchange":
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        if not exchange(tmp_path / "a", tmp_path / "b"):
            pytest.skip("this file system cannot exchange folders")

    def prepared(name, at=lambda _: None):
        if before != "nothing":
            save(opened(kind, tmp_path / name / "run"), "0", foreign=before == "foreign")
        return opened(kind, tmp_path / name / "run", at)

    steps = []
    clean = prepared("clean", steps.append)
    old = content(clean)
    save(clean, "1")
    new = content(clean)
    steps = list(dict.fromkeys(steps))
    if before == "foreign":
        assert set(steps) >= STEPS[kind]
        assert new["config.json"] == b"{}"
    seen = []
    for step in steps:
        folder = prepared(step, lambda reached, step=step: die() if reached == step else None)
        assert killed(lambda folder=folder: save(folder, "1"))
        after = opened(kind, tmp_path / step / "run")
        after.recover()
        seen.append(content(after))
        assert seen[-1] in (old, new), step
        save(opened(kind, tmp_path / step / "run"), "2")
        after.recover()
        assert content(after)["model.safetensors"] == b"2"
        assert entries(tmp_path / step) == ["run"], step
    assert seen == sorted(seen, key=lambda each: each == new), "the new one never goes again"
    assert old in seen
    assert new in seen


@pytest.mark.parametrize(
    ("kind", "step", "left"),
    [("renames", "retired", 2), ("remote", "removed", 2)],
)
def test_a_kill_while_removing_leaves_nothing_that_looks_whole(tmp_path, kind, step, left):
    folder = opened(kind, tmp_path / "run", lambda reached: die() if reached == step else None)

    save(opened(kind, tmp_path / "run"), "0")
    assert killed(folder.remove)
    after = opened(kind, tmp_path / "run")
    after.recover()
    assert not after.exists()
    assert len(list(tmp_path.rglob("*.safetensors"))) == left
    after.sweep()
    assert entries(tmp_path) == []


@pytest.mark.parametrize("step", ["nothing", "committed", "shown config.json", "removed"])
def test_an_error_of_a_remote_commit_leaves_the_old_or_the_new(tmp_path, step):
    """The saver lives on and discards its generation, unless that is the checkpoint already."""

    def fail(reached):
        if reached == step:
            raise OSError("the network is gone")

    files = {"model.safetensors": "1", "config.json": "{}"}
    save(opened("remote", tmp_path / "run"), "0")
    folder = opened("remote", tmp_path / "run", fail)
    if step == "nothing":  # the manifest arrives, its answer does not
        replace = folder.store.replace

        def replace_and_fail(path, data, beside):
            replace(path, data, beside)
            raise OSError("the network is gone")

        folder.store.replace = replace_and_fail
    with pytest.raises(OSError, match="the network is gone"):
        save(folder, "1", files=files)
    folder.stage("1").discard()
    after = opened("remote", tmp_path / "run")
    assert content(after)["model.safetensors"] == b"1"
    after.sweep()
    assert content(after)["model.safetensors"] == b"1"
    assert entries(tmp_path) == ["run"]


def test_a_remote_manifest_on_a_disk_is_never_empty_or_half_there(tmp_path):
    """Who has opened the old one still reads that: the new one is not written over it."""
    save(opened("remote", tmp_path / "run"), "0")
    manifest = tmp_path / "run" / "par_checkpoint.json"
    old = manifest.read_bytes()
    with manifest.open("rb") as opened_before:
        save(opened("remote", tmp_path / "run"), "1")
        assert opened_before.read() == old != manifest.read_bytes()
    assert len(list(tmp_path.rglob("par_checkpoint.json"))) == 1


def test_an_error_before_a_remote_commit_leaves_the_old_alone(tmp_path):
    save(opened("remote", tmp_path / "run"), "0")
    before = content(opened("remote", tmp_path / "run"))
    folder = opened("remote", tmp_path / "run")
    staging = folder.stage("1")
    staging.create(["model.safetensors"], 0)
    staging.write("model.safetensors", b"1")
    staging.discard()
    assert content(opened("remote", tmp_path / "run")) == before
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_a_kill_in_the_middle_of_a_remote_removal_leaves_the_old_or_the_new(tmp_path):
    """Objects are removed one by one: those of the old generation, and what shows all ranks the new one."""

    def save_and_die(folder, number):
        real, removals = folder.store.fs.rm_file, []

        def remove(path):
            removals.append(path)
            if len(removals) > number:
                die()
            real(path)

        folder.store.fs.rm_file = remove
        save(folder, "1")

    for number in range(9):
        path = tmp_path / str(number) / "run"
        save(opened("remote", path), "0")
        if not killed(lambda number=number, path=path: save_and_die(opened("remote", path), number)):
            break
        after = opened("remote", path)
        assert {data for name, data in content(after).items() if name.endswith(".safetensors")} == {b"1"}
        assert len(content(after)) == 3
        after.sweep()
        assert len(content(after)) == 3
        assert len(list(path.rglob("*.safetensors"))) == 2
    assert number == 3, "two objects of the old generation, and one that showed the new one"


def test_an_error_between_the_two_renames_puts_the_old_back(tmp_path):
    def fail(step):
        if step == "renamed-old":
            raise OSError("the disk is gone")

    save(opened("renames", tmp_path / "run"), "0")
    old = content(opened("renames", tmp_path / "run"))
    with pytest.raises(OSError, match="the disk is gone"):
        save(opened("renames", tmp_path / "run", fail), "1")
    assert content(opened("renames", tmp_path / "run")) == old


def test_a_reader_between_the_renames_of_a_saver_reads_the_old_one_and_renames_nothing(tmp_path):
    save(opened("renames", tmp_path / "run"), "0")
    reader, seen = opened("renames", tmp_path / "run"), []

    def read_meanwhile(step):
        if step == "renamed-old":
            before = entries(tmp_path)
            reader.recover()
            seen.append((content(reader)["model.safetensors"], reader.version()))
            assert entries(tmp_path) == before

    save(opened("renames", tmp_path / "run", read_meanwhile), "1")
    assert [data for data, _ in seen] == [b"0"]
    reader.recover()
    assert content(reader)["model.safetensors"] == b"1"
    assert reader.version() not in (None, seen[0][1]), "a reader that was at it starts again"


def test_a_reader_leaves_what_a_dead_saver_has_left_as_it_is(tmp_path):
    save(opened("renames", tmp_path / "run"), "0")
    dying = opened("renames", tmp_path / "run", lambda reached: die() if reached == "renamed-old" else None)
    assert killed(lambda: save(dying, "1"))
    before = entries(tmp_path)
    reader = opened("renames", tmp_path / "run")
    reader.recover()
    assert content(reader)["model.safetensors"] == b"0"
    assert entries(tmp_path) == before
    with pytest.raises(FileExistsError, match="overwrite=True"):
        reader.check_target(overwrite=False)
    reader.repair()
    assert content(opened("renames", tmp_path / "run"))["model.safetensors"] == b"0"


def test_a_saver_that_hangs_between_its_renames_is_reported_to_the_next_saver(tmp_path):
    other = LocalFolder(str(tmp_path / "run"), at=lambda _: None, patience=0)

    def save_meanwhile(step):
        if step == "renamed-old":
            with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* is replacing"):
                other.repair()

    save(opened("renames", tmp_path / "run"), "0")
    save(opened("renames", tmp_path / "run", save_meanwhile), "1")
    assert content(opened("renames", tmp_path / "run"))["model.safetensors"] == b"1"


@pytest.mark.parametrize("kind", ["exchange", "renames"])
def test_a_saver_at_work_is_not_swept(tmp_path, kind):
    first, second = opened(kind, tmp_path / "run"), opened(kind, tmp_path / "run")
    staging = first.stage("a")
    staging.create(["model.safetensors"], 0)
    save(second, "b")
    staging.write("model.safetensors", b"a")
    with pytest.raises(CheckpointError, match="another process wrote"):
        staging.publish(overwrite=False)
    staging.publish(overwrite=True)
    assert content(first) == {"model.safetensors": b"a"}
    assert entries(tmp_path) == ["run"]


@pytest.mark.parametrize("moment", ["leased", "created", "made"])
def test_a_staging_is_never_without_a_lease(tmp_path, moment):
    swept = []

    def sweep(step):
        if step == moment:
            swept.append(opened("exchange", tmp_path / "run").sweep())

    save(opened("exchange", tmp_path / "run", sweep), "a")
    assert swept == [[]]
    assert content(opened("exchange", tmp_path / "run"))["model.safetensors"] == b"a"


def test_a_saver_that_was_taken_for_dead_commits_nothing(tmp_path):
    save(opened("exchange", tmp_path / "run"), "0")
    staging = opened("exchange", tmp_path / "run").stage("a")
    staging.create(["model.safetensors"], 0)
    staging.write("model.safetensors", b"a")
    (tmp_path / ".run.lease-a").unlink()
    with pytest.raises(CheckpointError, match="took its save for dead"):
        staging.publish(overwrite=True)
    staging.discard()
    assert content(opened("exchange", tmp_path / "run"))["model.safetensors"] == b"0"


def test_a_forked_child_does_not_keep_the_lease(tmp_path):
    staging = opened("exchange", tmp_path / "run").stage("a")
    staging.create([], 0)
    asked, told = os.pipe()
    with forked() as child:
        if not child:
            os.close(told)
            os.read(asked, 1)  # until the parent closes its end
    if child:
        os.close(asked)
        staging.close()
        assert opened("exchange", tmp_path / "run").sweep() == [str(tmp_path / ".run.tmp-a")]
        os.close(told)
        os.waitpid(child, 0)


@pytest.mark.parametrize("kind", ["exchange", "renames"])
def test_a_target_that_appears_at_the_last_moment_is_kept(tmp_path, kind):
    def appear(step):
        if step == "synced-staging":
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "precious").touch()

    with pytest.raises(CheckpointError, match="precious"):
        save(opened(kind, tmp_path / "run", appear), "a")
    assert entries(tmp_path / "run") == ["precious"]


@pytest.mark.parametrize("kind", ["exchange", "renames", "remote"])
def test_unknown_files_forbid_overwriting_and_nothing_changes(tmp_path, kind):
    folder = opened(kind, tmp_path / "run")
    save(folder, "0")
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "notes" / "mine.txt").touch()
    before = content(folder)
    with pytest.raises(CheckpointError, match=r"notes/mine\.txt. Nothing was changed"):
        folder.check_target(overwrite=True)
    with pytest.raises(CheckpointError, match=r"notes/mine\.txt"):
        save(folder, "1")
    assert content(folder) == before
    assert (tmp_path / "run" / "notes" / "mine.txt").exists()


@pytest.mark.parametrize("kind", ["exchange", "renames", "remote"])
def test_without_overwrite_what_is_there_stays(tmp_path, kind):
    folder = opened(kind, tmp_path / "run")
    save(folder, "0", overwrite=False)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        folder.check_target(overwrite=False)
    with pytest.raises(CheckpointError, match="another process wrote"):
        save(folder, "1", overwrite=False)
    assert content(folder)["model.safetensors"] == b"0"


@pytest.mark.parametrize("kind", ["exchange", "renames", "remote"])
def test_config_and_tokenizer_survive_and_old_weights_go(tmp_path, kind):
    folder = opened(kind, tmp_path / "run")
    save(folder, "0", files={"model.safetensors": "0", "config.json": "old", "tokenizer.json": "t"})
    save(folder, "1", files={"model-00001-of-00001.safetensors": "1", "config.json": "new"})
    found = content(folder)
    del found["par_checkpoint.json"]
    assert found == {"model-00001-of-00001.safetensors": b"1", "config.json": b"new", "tokenizer.json": b"t"}
    save(folder, "2", files={"model.safetensors": "2"})
    assert folder.read("config.json") == b"new"


def test_links_are_never_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    folder = opened("exchange", tmp_path / "run")
    with pytest.raises(CheckpointError, match="a link or a file"):
        save(folder, "0")
    with pytest.raises(CheckpointError, match="symbolic link"):
        folder.remove()
    assert entries(tmp_path / "real") == []


def test_what_links_point_to_outlives_overwriting_and_removal(tmp_path):
    (tmp_path / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "blobs" / name).write_text("blob")
    (tmp_path / "run").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "run" / name).symlink_to(f"../blobs/{name}")
    folder = opened("exchange", tmp_path / "run")
    save(folder, "1")
    assert folder.read("config.json") == b"blob"
    assert (tmp_path / "run" / "config.json").is_symlink()
    folder.remove()
    assert (tmp_path / "blobs" / "model.safetensors").read_text() == "blob"
    assert entries(tmp_path) == ["blobs"]
