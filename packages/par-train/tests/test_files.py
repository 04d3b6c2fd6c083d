from par_train._files import RunFiles, write_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_file_replaces(tmp_path):
    write_file(tmp_path / "file", b"one")
    write_file(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert names(tmp_path) == ["file"]


def test_clear_removes_the_run_alone(tmp_path):
    files = RunFiles(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    files.metrics.write_text("{}")
    files.checkpoint.mkdir()
    (files.checkpoint / "model.safetensors").write_text("weights")
    assert files.present() == [files.checkpoint, files.metrics]
    files.clear()
    assert names(tmp_path) == ["notes.txt"]
