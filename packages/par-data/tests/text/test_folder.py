"""A folder of text: which files count, in which order, and where it is divided."""

import re

import numpy as np
import pytest

from par_data import read_folder_text as read


def fill(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_read_folder_text_skips_what_is_no_text(tmp_path):
    taken = {"a.txt": b"one ", "deep/er/b.py": b"two ", "umlaut.md": "drüben ".encode()}
    left = {"nul.bin": b"\0", "latin.txt": b"\xe4", ".git/c": b"hidden", "__pycache__/d": b"e", "site-packages/f": b"g"}
    fill(tmp_path, {**taken, **left})
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "deep")
    text = read(tmp_path)
    whole = text.train + text.held_out
    assert text.files == len(taken)
    assert len(whole) == sum(map(len, taken.values()))
    assert all(data in whole for data in taken.values())


def test_read_folder_text_with_patterns_chooses_files(tmp_path):
    fill(tmp_path, {"a.txt": b"text", "b/c.py": b"code", "d.md": b"mark"})
    assert read(tmp_path, patterns=("*.py", "*.md")).files == 2


def test_read_folder_text_has_a_fixed_shuffled_order(tmp_path):
    names = [f"{number:02}" for number in range(20)]
    fill(tmp_path / "one", {name: name.encode() for name in names})
    fill(tmp_path / "two", {name: name.encode() for name in reversed(names)})
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one.train + one.held_out == two.train + two.held_out != "".join(names).encode()
    assert one.digest == two.digest


def test_read_folder_text_holds_out_the_last_part(tmp_path):
    fill(tmp_path, {"a": bytes(range(1, 101))})
    text = read(tmp_path, validation_fraction=0.2)
    assert text.train == bytes(range(1, 81))
    assert text.held_out == bytes(range(81, 101))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 5.0])
def test_read_folder_text_raises_on_a_fraction_out_of_range(tmp_path, fraction):
    fill(tmp_path, {"a": bytes(100)})
    with pytest.raises(ValueError, match=r"it must be at least 0 and below 1; pass such a fraction"):
        read(tmp_path, validation_fraction=fraction)


def test_folder_text_digest_depends_on_bytes_and_parts(tmp_path):
    fill(tmp_path, {"a/a": b"0123456789" * 9, "b/a": b"0123456780" * 9})
    digests = {read(tmp_path / "a").digest, read(tmp_path / "b").digest}
    digests.add(read(tmp_path / "a", validation_fraction=0.5).digest)
    assert len(digests) == 3


def test_read_folder_text_documents_are_files_or_paragraphs(tmp_path):
    fill(tmp_path, {"a": b"one\n\ntwo\n \n\n  three", "b": b"\n\n", "c": b"x", "d": b""})
    assert read(tmp_path).documents is None
    for kind, expected in (("files", [1, 2, 19]), ("paragraphs", [1, 2, 5, 7, 7])):  # empty files are none
        text = read(tmp_path, documents=kind, validation_fraction=0.0001)
        assert sorted(text.documents[0]) == sorted(expected)
        assert len(text.documents[1]) == 0
        digests = {text.digest, read(tmp_path).digest}
        for fraction in (0.3, 0.5, 0.9):  # the cut divides a document, or lies between two
            cut = read(tmp_path, documents=kind, validation_fraction=fraction)
            assert (cut.documents[0].sum(), cut.documents[1].sum()) == (len(cut.train), len(cut.held_out))
            whole, parts = np.cumsum(text.documents[0]), np.cumsum(np.concatenate(cut.documents))
            assert set(parts) == {*whole, len(cut.train)}
            digests.add(cut.digest)
        assert len(digests) == 5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (lambda folder: folder.write_text("a file"), "is not a folder"),
        (lambda folder: folder.mkdir(), "holds no text file; pass a folder"),
        (lambda folder: fill(folder, {"a.bin": b"\0"}), "holds no text file; pass a folder"),
    ],
)
def test_read_folder_text_without_text_raises(tmp_path, prepare, message):
    folder = tmp_path / "corpus"
    prepare(folder)
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}.*{message}"):
        read(folder)


def test_read_folder_text_names_patterns_without_a_match(tmp_path):
    fill(tmp_path, {"a.txt": b"text"})
    with pytest.raises(ValueError, match=r"no text file that matches \*\.py"):
        read(tmp_path, patterns=("*.py",))
