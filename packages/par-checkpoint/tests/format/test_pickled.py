import collections
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.pickled import load_object, load_pickle

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(True), "c": torch.ones(2, dtype=torch.bfloat16)}


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of the file was run')",))


def copied(source, target, compression, name=None):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            chosen = compression if name is None or entry.filename.endswith(name) else zipfile.ZIP_STORED
            new.writestr(entry.filename, old.read(entry), compress_type=chosen)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_state_dict_comes_back(tmp_path, zipped):
    torch.save(collections.OrderedDict(STATE), tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    found = load_pickle(tmp_path / "x.bin")
    assert list(found) == list(STATE)
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the memory map of the process")
def test_a_zip_file_stays_on_disk_until_it_is_touched(tmp_path):
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.bin")
    found = load_pickle(tmp_path / "x.bin")["a"]
    assert str(tmp_path / "x.bin") in Path("/proc/self/maps").read_text()
    assert found.tolist() == [0] * 1000


@pytest.mark.parametrize("name", ["data.pkl", "data/0", None])
def test_a_deflated_entry_is_refused_by_name(tmp_path, name):
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "x.bin")
    copied(tmp_path / "x.bin", tmp_path / "stored.bin", zipfile.ZIP_STORED)
    assert torch.equal(load_pickle(tmp_path / "stored.bin")["a"], torch.zeros(1 << 16))
    copied(tmp_path / "x.bin", tmp_path / "deflated.bin", zipfile.ZIP_DEFLATED, name)
    assert (tmp_path / "deflated.bin").stat().st_size < (tmp_path / "stored.bin").stat().st_size
    with pytest.raises(CheckpointError, match=f"entry '.*{name or ''}.*is compressed"):
        load_pickle(tmp_path / "deflated.bin")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_never_run(tmp_path, zipped):
    torch.save({"a": Evil()}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="would run code when loaded, which is refused"):
        load_pickle(tmp_path / "x.bin")


def test_code_in_a_plain_pickle_is_never_run(tmp_path):
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(CheckpointError, match="refused"):
        load_object(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("value", "what"),
    [([torch.zeros(1)], "a list, not"), ({"model": STATE}, "a dict under"), ({1: STATE["a"]}, "under 1")],
)
def test_a_model_is_a_flat_dict_of_tensors(tmp_path, value, what):
    torch.save(value, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=what):
        load_pickle(tmp_path / "x.bin")


def test_other_objects_come_back_as_objects(tmp_path):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    assert load_object(tmp_path / "x.pt") == optimizer.state_dict()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, zipped):
    torch.save(STATE, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "x.bin").read_bytes()
    for end in (0, 3, 4, 30, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.bin").write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=r"cut\.bin"):
            load_pickle(tmp_path / "cut.bin")


def test_entries_that_overlap_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1 << 12)}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin", "a") as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
        for number in range(3):
            again = zipfile.ZipInfo(f"more{number}")
            again.header_offset, again.CRC = entry.header_offset, entry.CRC
            again.file_size = again.compress_size = entry.file_size
            archive.filelist.append(again)
        archive._didModify = True
    with pytest.raises(CheckpointError, match="overlap"):
        load_pickle(tmp_path / "x.bin")


def test_load_of_a_missing_pickle_names_it(tmp_path):
    with pytest.raises(CorruptError, match="cannot be opened"):
        load_object(tmp_path / "none.bin")


def test_a_broken_zip_file_is_corrupt(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptError, match="broken zip"):
        load_object(tmp_path / "x.bin")
