"""Rounds by the kernel for GPUs, run by Triton's interpreter, and by torch's operations; run with TRITON_INTERPRET=1.

Without bf16 numbers below 2**-126, which the interpreter converts wrongly.
"""

import torch

from par_groups import Box, Segments, Sharding, set_sharding
from par_precision.rounding import rounding, triton
from par_precision.rounding.rounding import Rounding, packed_in, round_all_

HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(), (1,), (0, 3), (123,), (15, 17), (3, 5, 7), (4096,), (9000,), (70, 130)]


def transposed(tensor):
    """The same values, in memory the other way round."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def unaligned(tensor):
    """The same values at an address that is no multiple of more than an element."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def unchanged(tensor):
    """The tensor."""
    return tensor


def roundings():
    """Of both dtypes, of several shapes, and of what lies in memory in several ways."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in HALVES:
        for scale in (1.0, 1e-6):
            for shape in SHAPES:
                source = torch.randn(shape, generator=generator) * scale
                for into in (unchanged, transposed, unaligned):
                    for given in (unchanged, transposed, unaligned):
                        target = into(torch.zeros(shape, dtype=dtype))
                        found.append(Rounding(target, given(source), f"weight {len(found)}", ".suffix"))
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 0.0]).repeat(1000)
        found.append(Rounding(torch.zeros(5000, dtype=dtype), odd, "not finite"))
        part = torch.zeros(100, 200, dtype=dtype)
        box = Box((2**20 - 100, 7), (100, 200), 0, (200, 1), (0,))
        set_sharding(part, Sharding((2**20, 2**14), (box,)))
        packed = packed_in(part, "part")
        assert isinstance(packed, Segments)
        found.append(Rounding(part, torch.randn(100, 200, generator=generator), packed))
    return found


def assert_same(found, expected):
    """The same bits, but for those of NaN."""
    torch.testing.assert_close(
        found.target,
        expected.target,
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{expected.packed}: {text}",
    )


def check():
    """Both ways have the same results, also where a matrix is alone."""
    expected, together, alone = roundings(), roundings(), roundings()
    round_all_(expected, 1, 2)
    rounding.rounds_on = lambda _: triton.round_matrices_
    round_all_(together, 1, 2)
    for each in alone:
        round_all_([each], 1, 2)
    for others in (together, alone):
        for one, other in zip(expected, others, strict=True):
            assert_same(other, one)


if __name__ == "__main__":
    check()
