import os
import sys

import pytest

from par_checkpoint.storage.local import LocalWriter

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sync_file_range")
def test_large_writes_leave_the_page_cache_in_the_order_in_which_they_came(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, size, advice: left.append((begin, size, advice)))
    writer = LocalWriter(tmp_path / "file")
    blocks = [os.urandom(MIB) for _ in range(19)]
    for number, block in enumerate(blocks):
        writer.write_at(number * MIB, memoryview(block))
        writer.write_at((number + 1) * MIB, memoryview(b"small"))
    writer.finish()
    assert left == [(number * MIB, MIB, os.POSIX_FADV_DONTNEED) for number in range(3)]
    assert (tmp_path / "file").read_bytes() == b"".join(blocks) + b"small"


def test_what_cannot_be_written_back_early_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("par_checkpoint.storage.write_back._sync_file_range", lambda: None)
    writer = LocalWriter(tmp_path / "file")
    writer.write_at(0, memoryview(bytes(2 * MIB)))
    writer.finish()
    assert (tmp_path / "file").read_bytes() == bytes(2 * MIB)
