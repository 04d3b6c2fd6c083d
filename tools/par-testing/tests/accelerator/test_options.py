"""Options of a strict device, validated before a process is made."""

import pytest

from par_testing import Accelerator, Costs


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Accelerator(limit="64 apples"), "limit='64 apples': a size is a number and one of"),
        (lambda: Accelerator(limit=1), "limit=1: a size is from 512"),
        (lambda: Accelerator(devices=0), r"Accelerator\(devices=0\): at least 1 is needed"),
        (lambda: Accelerator(segments="large"), r"segments='large'\): unknown; pass one of 'exact', 'cuda'"),
        (lambda: Accelerator(races="warn"), "pass one of 'error', 'record'"),
        (lambda: Accelerator(waits="never"), "pass one of 'count', 'error'"),
        (lambda: Costs(link=0), r"Costs\(link=0\): a speed is above 0"),
        (lambda: Costs(launch=-1.0), r"Costs\(launch=-1.0\): seconds are at least 0"),
    ],
)
def test_option_out_of_range_raises(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_limit_is_bytes_or_a_text():
    assert Accelerator(limit="64MiB").bytes == Accelerator(limit=64 << 20).bytes == 64 << 20
    assert Accelerator().bytes is None
