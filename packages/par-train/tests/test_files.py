import pytest

from par_train._files import RunFiles, existing_folder, replace_folder, write_file


def fill_with(text):
    return lambda folder: (folder / "file").write_text(text) and None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_file_replaces(tmp_path):
    write_file(tmp_path / "file", b"one")
    write_file(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert names(tmp_path) == ["file"]


def test_replace_folder_replaces(tmp_path):
    replace_folder(tmp_path / "state", fill_with("one"))
    replace_folder(tmp_path / "state", fill_with("two"))
    assert (tmp_path / "state" / "file").read_text() == "two"
    assert names(tmp_path) == ["state"]


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    def fail(folder):
        (folder / "file").write_text("half")
        raise OSError("disk full")

    replace_folder(tmp_path / "state", fill_with("one"))
    with pytest.raises(OSError, match="disk full"):
        replace_folder(tmp_path / "state", fail)
    assert (existing_folder(tmp_path / "state") / "file").read_text() == "one"
    replace_folder(tmp_path / "state", fill_with("two"))
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize("fatal", [1, 2])
def test_a_crash_between_the_moves_leaves_one_of_them(tmp_path, monkeypatch, fatal):
    """Ends the writing before each of the two renames, as a power cut would."""
    state = tmp_path / "state"
    replace_folder(state, fill_with("one"))
    rename, calls = type(state).rename, []

    def crashing(path, target):
        calls.append(path)
        if len(calls) == fatal:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(type(state), "rename", crashing)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(state, fill_with("two"))
    assert (existing_folder(state) / "file").read_text() == "one"
    replace_folder(state, fill_with("three"))
    assert (existing_folder(state) / "file").read_text() == "three"
    assert names(tmp_path) == ["state"]


def test_clear_removes_the_run_alone(tmp_path):
    files = RunFiles(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    files.metrics.write_text("{}")
    replace_folder(files.checkpoint, fill_with("one"))
    assert files.present() == [files.checkpoint, files.metrics]
    files.clear()
    assert names(tmp_path) == ["notes.txt"]
