import uuid
from pathlib import Path

import pytest
import torch.distributed as dist
from crc32c import crc32c

from par_checkpoint import latest
from par_checkpoint._errors import CheckpointError
from par_checkpoint.format.manifest import Manifest, encode_manifest
from par_checkpoint.storage.folder import open_folder
from par_checkpoint.storage.steps import prune, read_manifest, step_name, step_of


def sound(generation=""):
    empty = {"model": None, "optimizer": None, "scheduler": None, "extra": None}
    return encode_manifest(Manifest(style="huggingface", files={}, tied={}, generation=generation, **empty))


SOUND = sound()


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def save(root, *steps, manifest=SOUND, **files):
    for step in steps:
        folder = open_folder(root).child(step_name(step))
        staging = folder.stage(uuid.uuid4().hex)
        staging.create(files, 0)
        for name, data in {"config.json": b"{}", "par_checkpoint.json": sound(staging.generation)}.items():
            staging.write(name, data)
        staging.publish(overwrite=True)
        staging.close()
        changed = {**files, **({"par_checkpoint.json": manifest} if manifest is not SOUND else {})}
        for name, data in changed.items():
            if root.startswith("memory"):
                folder.store.put(f"{folder.path}/{name}", data)
            else:
                (folder.path / name).write_bytes(data)


def steps_in(root):
    return [step_of(name) for name in open_folder(root).folders()]


def path_of(root, step):
    return f"{root}/{step_name(step)}"


def test_names_of_steps_sort_and_are_read_back():
    assert step_name(100) == "step-00000100"
    assert [step_of(step_name(step)) for step in (0, 7, 10**8, 10**9)] == [0, 7, 10**8, 10**9]
    for name in ("step-100", "step-000000100", "step-0000010x", "xstep-00000100", ".step-00000100.tmp-1"):
        assert step_of(name) is None
    with pytest.raises(ValueError, match="step -1 is negative"):
        step_name(-1)


def test_latest_is_the_highest_whole_step(root):
    assert latest(root) is None
    save(root, 5, 20)
    save(root, 30, manifest=SOUND[:-2])
    open_folder(root).child(step_name(40)).stage("n1").create(["config.json"], 0)
    assert latest(root) == path_of(root, 20)


def test_latest_finds_a_step_whose_replacement_died(root):
    class Died(Exception):
        pass

    def die(step):
        if step in ("renamed-old", "committed"):
            raise Died

    save(root, 10, 20)
    if root.startswith("memory"):
        staging = open_folder(root, die).child(step_name(20)).stage("n1")
        staging.create([], 0)
        staging.write("par_checkpoint.json", sound("generation-n1"))
        with pytest.raises(Died):
            staging.publish(overwrite=True)
    else:
        Path(path_of(root, 20)).rename(Path(root) / f".{step_name(20)}.old-n1")
    assert latest(root) == path_of(root, 20)
    folder = open_folder(path_of(root, 20))
    folder.recover()
    assert read_manifest(folder) is not None


def test_a_step_of_a_newer_version_is_not_passed_over(root):
    save(root, 10)
    newer = SOUND[len(b'{"checksum": "00000000"') :].replace(b'"format": 1', b'"format": 99')
    save(root, 20, manifest=b'{"checksum": "%08x"' % crc32c(newer) + newer)
    with pytest.raises(CheckpointError, match="99"):
        latest(root)


def test_pruning_keeps_the_last_and_the_regular_ones(root):
    save(root, 0, 10, 15, 20, 25, 30)
    told = prune(root, keep_last=2, keep_every=20, dry_run=True)
    assert steps_in(root) == [0, 10, 15, 20, 25, 30]
    assert prune(root, keep_last=2, keep_every=20) == told == [path_of(root, 15), path_of(root, 10)]
    assert told.kept == {}
    assert steps_in(root) == [0, 20, 25, 30]
    assert prune(root, keep_last=2, keep_every=20) == []
    prune(root, keep_last=1)
    assert steps_in(root) == [30]


def test_broken_steps_do_not_count_and_stay(root):
    save(root, 10, 20)
    save(root, 30, manifest=b"{}")
    pruned = prune(root, keep_last=1)
    assert pruned == [path_of(root, 10)]
    assert list(pruned.kept) == [path_of(root, 30)]
    assert "not a whole checkpoint" in pruned.kept[path_of(root, 30)]
    assert steps_in(root) == [20, 30]


def test_steps_with_other_files_stay(root):
    save(root, 10, **{"notes.txt": b"mine"})
    save(root, 20)
    pruned = prune(root, keep_last=1)
    assert pruned == []
    assert list(pruned.kept) == [path_of(root, 10)]
    assert "notes.txt" in pruned.kept[path_of(root, 10)]
    assert steps_in(root) == [10, 20]


def test_remnants_of_older_steps_go_and_those_of_the_newest_stay(root):
    save(root, 10, 20)
    for step in (5, 10, 20, 30):
        staging = open_folder(root).child(step_name(step)).stage("n1")
        staging.create(["config.json"], 0)
        staging.close()
    removed = prune(root, keep_last=2)
    if root.startswith("memory"):
        assert [path.rpartition("/step-")[2] for path in removed] == [
            "00000010/generation-n1",
            "00000005/generation-n1",
        ]
        assert [step for step in steps_in(root) if open_folder(path_of(root, step)).sweep(dry_run=True)] == [20, 30]
        return
    assert [path.rpartition("/")[2] for path in removed] == [f".{step_name(step)}.tmp-n1" for step in (10, 5)]
    assert {name for name in open_folder(root).folders() if name.startswith(".")} == {
        f".{step_name(step)}.tmp-n1" for step in (20, 30)
    }


def test_links_to_steps_are_found_and_stay(tmp_path):
    save(str(tmp_path / "elsewhere"), 10)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / step_name(10)).symlink_to(f"../elsewhere/{step_name(10)}")
    assert latest(tmp_path / "root") == path_of(tmp_path / "root", 10)
    save(str(tmp_path / "root"), 20)
    assert prune(tmp_path / "root", keep_last=1) == []
    assert latest(tmp_path / "elsewhere") == path_of(tmp_path / "elsewhere", 10)


@pytest.mark.parametrize("options", [{"keep_last": 0}, {"keep_every": 0}])
def test_counts_below_one_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, **options)


@pytest.mark.ranks(2)
def test_the_first_rank_decides_for_all(tmp_path):
    root = str(tmp_path / str(dist.get_rank()))
    save(root, 10 + dist.get_rank())
    assert latest(root) == path_of(tmp_path / "0", 10)
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert latest(root, group=own) == path_of(root, 10 + dist.get_rank())


@pytest.mark.ranks(2)
def test_an_error_of_the_first_rank_raises_on_all(tmp_path):
    root = tmp_path / "root"
    with pytest.raises(TypeError, match="give it as str"):
        latest(bytes(root) if dist.get_rank() == 0 else root)
