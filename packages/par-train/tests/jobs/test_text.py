import pytest

from par_train._errors import UserError
from par_train.jobs.options import DataOptions
from par_train.jobs.text import read_text


def test_read_text_without_a_folder_reads_the_standard_library():
    text = read_text(DataOptions(patterns=("dataclasses.py",)))
    assert (text.folder / "dataclasses.py").is_file()
    assert text.documents is None


def test_read_text_passes_the_options_on(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo three")
    options = DataOptions(folder=str(tmp_path), packing="whole", documents="paragraphs", validation_fraction=0.5)
    assert [list(lengths) for lengths in read_text(options).documents] == [[5, 2], [7]]


def test_read_text_without_text_raises(tmp_path):
    with pytest.raises(UserError, match=r"data\.folder: .* holds no text file"):
        read_text(DataOptions(folder=str(tmp_path)))
