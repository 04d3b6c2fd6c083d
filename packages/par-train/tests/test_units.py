import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_train._units import format_bytes, format_seconds, parse_rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80e9),
        ("80 GB", 80e9),
        ("80gb", 80e9),
        ("80G", 80e9),
        ("80GiB", 80 * 2**30),
        ("1.5TiB", 1.5 * 2**40),
        ("512MB", 512e6),
        ("1000", 1000),
        ("400e9", 400e9),
        ("400GB/s", 400e9),
    ],
)
def test_sizes(text, expected):
    assert parse_rate(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "80QB", "eighty", "-1GB", "8iB", "1.2.3GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"\S"):
        parse_rate(text)


@given(st.floats(1e3, 9.99e17))
def test_bytes_in_words_are_read_back(count):
    assert parse_rate(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=0.05)


def test_seconds_in_words():
    assert [format_seconds(each) for each in (7.344, 0.0125, 3e-6, 12345.6)] == [
        "7.34 s",
        "12.5 ms",
        "3.0 us",
        "12,346 s",
    ]
