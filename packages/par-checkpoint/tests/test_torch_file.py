"""One object as a single file of torch.save."""

import json

import pytest
import torch
from torch import nn

from par_checkpoint import CheckpointError, load_torch_file, save_torch_file


def test_torch_file_round_trip_needs_no_process_group(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save_torch_file(tmp_path / "model.pt", model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.pt.json"]
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["weight"], model.weight)
    load_torch_file(tmp_path / "model.pt", model=other)
    assert torch.equal(other.weight, model.weight)
    assert len(list(tmp_path.iterdir())) == 2


def test_torch_file_without_checksums_loads(tmp_path):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    load_torch_file(tmp_path / "model.pt", model=other)
    assert torch.equal(other.bias, model.bias)


def test_torch_file_with_a_flipped_byte_raises(tmp_path):
    save_torch_file(tmp_path / "model.pt", model=nn.Linear(3, 2))
    assert json.loads((tmp_path / "model.pt.json").read_text())
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(CheckpointError):
        load_torch_file(tmp_path / "model.pt", model=nn.Linear(3, 2))
