"""What kind of file system a path is on, and where data begins in a file for it."""

import sys
from pathlib import Path

import pytest
import torch

from par_checkpoint.format.header import encode_header
from par_checkpoint.storage import sharing
from par_checkpoint.storage.sharing import Sharing, sharing_of


def test_local_disks_are_written_in_ranges_and_what_is_not_known_file_by_file(tmp_path, monkeypatch):
    assert sharing_of(Path("/dev/shm") if sys.platform == "linux" else tmp_path) in (Sharing.RANGES, Sharing.FILES)
    kinds = {0xEF53: 0, 0x01021994: 0, 0x0BD00BD0: 1, 0x47504653: 1, 0x6969: 2, 0xFF534D42: 2, 0x65735546: 2, 7: 2}
    for magic, expected in kinds.items():
        monkeypatch.setattr(sharing, "_magic", lambda _, magic=magic: magic)
        assert sharing_of(tmp_path / "not" / "there") == expected


@pytest.mark.parametrize("alignment", [8, 4096, 1 << 20])
def test_data_begins_at_the_edge_of_a_page_and_safetensors_reads_it(tmp_path, alignment):
    from safetensors.torch import load_file

    value = torch.arange(6.0)
    header, laid = encode_header({"w": (value.dtype, tuple(value.shape))}, alignment=alignment)
    assert len(header) == laid.data_begin
    assert laid.data_begin % alignment == 0
    (tmp_path / "f").write_bytes(header + bytes(value.numpy().tobytes()))
    assert torch.equal(load_file(tmp_path / "f")["w"], value)
