"""What a device lacks for a precision, and what to use."""

import re

import pytest
import torch

from par_precision._precisions import PRECISIONS, check_device, lack, precision_of

VOLTA, AMPERE, HOPPER, NONE = (7, 0), (8, 0), (9, 0), (0, 0)


@pytest.mark.parametrize(
    ("name", "device", "capability", "words"),
    [
        ("tf32", "cpu", NONE, "the module is on 'cpu'; use 'fp32'"),
        ("tf32", "mps", NONE, "the module is on 'mps'; use 'fp32'"),
        ("tf32", "an AMD GPU", NONE, "'an AMD GPU'; use 'fp32'"),
        ("tf32", "cuda", VOLTA, "has compute capability 7.0; use 'fp32'"),
        ("fp8", "cuda", AMPERE, "8.9 or above, and this GPU has compute capability 8.0; use 'bf16'"),
        ("fp8", "mps", NONE, "the module is on 'mps'; use 'bf16'"),
        ("bf16", "cuda", VOLTA, "this GPU has compute capability 7.0; use 'fp16'"),
        ("bf16-sr", "cuda", VOLTA, "use 'fp16'"),
        ("bf16-amp", "cuda", VOLTA, "use 'fp16-amp'"),
    ],
)
def test_what_is_lacking_is_said_with_what_to_use(name, device, capability, words):
    assert re.search(re.escape(words), lack(name, device, capability))


def test_a_recent_gpu_lacks_nothing_and_a_cpu_tf32_alone():
    assert [lack(name, "cuda", HOPPER) for name in PRECISIONS] == [None] * len(PRECISIONS)
    assert [name for name in PRECISIONS if lack(name, "cpu", NONE)] == ["tf32"]
    assert [name for name in PRECISIONS if lack(name, "cuda", VOLTA) is None] == ["fp32", "fp16-amp", "fp16"]


def test_the_device_itself_is_asked():
    with pytest.raises(RuntimeError, match="use 'fp32'"):
        check_device("tf32", torch.device("cpu"))
    check_device("fp8", torch.device("cpu"))


def test_an_unknown_precision_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="precision is 'half'; it can be 'fp32', 'tf32', 'bf16'"):
        precision_of("half")
