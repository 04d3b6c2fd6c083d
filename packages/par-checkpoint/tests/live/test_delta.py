"""Encoding of the values that changed, without processes."""

import itertools

import pytest
import torch

from par_checkpoint.live.delta import changed_mask, decode_, encode_, encoded_bytes
from par_testing import for_each

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.bool]


def bits(tensor):
    """The bytes of a tensor."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("changed", "form"), [(0, 0), (1, 6), (31, 186), (32, 189), (300, 725), (937, 1999), (938, 2000), (1000, 2000)]
)
def test_encoded_bytes_are_those_of_the_shortest_form(changed, form):
    assert encoded_bytes(1000, 2, changed) == form


@for_each(dtype=DTYPES)
def test_decode_restores_every_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    for count, part in itertools.product((1, 7, 8, 333), (0.0, 0.02, 0.3, 0.9, 1.0)):
        base = torch.randint(0, 2, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
        change = torch.rand(count, generator=generator) < part
        new = base.clone()
        new.view(torch.uint8).view(count, -1)[:, 0] ^= change
        mask = changed_mask(base, new)
        number = int(mask.sum())
        assert mask.tolist() == change.tolist()
        width = dtype.itemsize
        # The buffer has the exact size of a form, so both ends must choose the same one.
        size = min(-(-count // 8) + number * width, number * (4 + width))
        buffer = torch.zeros(size, dtype=torch.uint8)
        if number:
            encode_(buffer, new, mask)
            decode_(base, buffer, dtype, number)
        assert torch.equal(bits(base), bits(new))


def test_decode_writes_to_strided_and_wider_memory():
    base = torch.arange(12.0).view(3, 4)
    new = base.T.clone().bfloat16()
    new[1, 2] = -5
    mask = changed_mask(base.T.bfloat16(), new)
    buffer = torch.zeros(6, dtype=torch.uint8)
    encode_(buffer, new, mask)
    decode_(base.T, buffer, torch.bfloat16, 1)
    assert torch.equal(base.T, new.float())


def test_changed_mask_compares_bits():
    payloads = torch.tensor([0x7FC00001, 0x7FC00001, 0, -0x80000000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert changed_mask(payloads, other).tolist() == [False, True, True, False]
