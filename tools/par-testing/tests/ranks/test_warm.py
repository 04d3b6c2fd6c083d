"""What the forkserver does once, so that a rank is cheap to fork and has nothing slow left to do first."""

import os
import re
import traceback
from pathlib import Path

import pytest
import torch

from par_testing.ranks.huge_pages import HUGE, _pages_of_own_memory, collapse_into_huge_pages

MAPS = f"""\
00400000-00600000 r-xp 00000000 fe:00 411 /usr/bin/python
{HUGE + 4096:x}-{4 * HUGE + 4096:x} rw-p 00000000 00:00 0 [heap]
{8 * HUGE:x}-{9 * HUGE - 4096:x} rw-p 00000000 00:00 0
{16 * HUGE:x}-{18 * HUGE:x} rw-p 00000000 00:00 0
{32 * HUGE:x}-{33 * HUGE:x} rw-p 00000000 fe:00 412 /usr/lib/libtorch_cpu.so
{64 * HUGE:x}-{65 * HUGE:x} rw-p 00000000 00:00 0 [stack]
"""


def test_whole_huge_pages_of_own_memory_are_found():
    assert list(_pages_of_own_memory(MAPS)) == [each * HUGE for each in (2, 3, 16, 17)]


@pytest.mark.ranks(1, init=False)
def test_a_rank_is_forked_from_huge_pages():
    if collapse_into_huge_pages() == 0:
        pytest.skip("the kernel puts no memory into huge pages when it is asked to")
    assert kilobytes("AnonHugePages", Path(f"/proc/{os.getppid()}/smaps_rollup")) > 50_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is seeded as torch does it")
@pytest.mark.ranks(1)
def test_a_seed_reads_no_stack_and_draws_the_same_numbers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "format_stack", lambda: pytest.fail("a stack was read"))
        torch.manual_seed(7)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def kilobytes(name: str, file: Path) -> int:
    found = re.search(rf"^{name}: +(\d+) kB$", file.read_text(), re.MULTILINE)
    return int(found.group(1)) if found else 0
