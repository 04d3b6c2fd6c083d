import json

import pytest
import torch
from safetensors.torch import _SIZE, save

from par_checkpoint._errors import CheckpointError, CorruptError
from par_checkpoint.format.header import _DTYPES, _ORDERED, dtype_of, order_of, safetensors_name


def test_names_and_order_are_those_of_safetensors():
    tensors = {name: torch.zeros(1, dtype=dtype) for name, dtype in reversed(_ORDERED) if dtype in _SIZE}
    data = save(tensors)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {name: entry["dtype"] for name, entry in header.items()} == {name: name for name in tensors}
    assert list(header) == sorted(tensors, key=lambda name: order_of(dtype_of(name)))


def test_every_name_leads_back_to_its_dtype():
    for name, dtype in _DTYPES.items():
        assert dtype_of(name) is dtype
        assert safetensors_name(dtype, "x") == name


def test_wider_elements_come_first():
    widths = [dtype.itemsize for dtype in sorted(_DTYPES.values(), key=order_of)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.qint8, torch.float4_e2m1fn_x2, torch.int4])
def test_what_files_cannot_hold_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"'layer.weight' is {dtype}"):
        safetensors_name(dtype, "layer.weight")


def test_an_unknown_name_is_corrupt():
    with pytest.raises(CorruptError, match="'f32' is none of"):
        dtype_of("f32")


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
def test_elements_below_a_byte_are_named(name):
    with pytest.raises(CheckpointError, match=f"{name} has elements of less than a byte") as caught:
        dtype_of(name)
    assert not isinstance(caught.value, CorruptError)
