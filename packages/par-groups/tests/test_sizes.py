import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_groups import format_bytes, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80gb", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80gi", 80 * 2**30),
        ("1.5kB", 1500),
        (".5GB", 500_000_000),
        ("5.MB", 5_000_000),
        ("0.1GB", 100_000_000),
        ("100B", 100),
        ("100", 100),
        ("1_000", 1000),
        ("1e3", 1000),
        ("1E3MB", 10**9),
        ("2.5e-1 TiB", 2**38),
        (" 1PB\n", 10**15),
        ("0", 0),
        ("0.9B", 0),
        (17, 17),
    ],
)
def test_parse_size_of_what_people_write_is_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "GB",
            "-5GB",
            "+5GB",
            "5GBs",
            "5 parsecs",
            "nanGB",
            "infGB",
            "\u0665GB",
            "1.2.3GB",
            "8iB",
            "80QB",
            "1__0",
        ),
        *("1__0", "_1", "e3", "5bits", "1,5GB", "0x10", "1e9999GB", "5\udc80GB", "5GB/s"),
    ],
)
def test_parse_size_of_another_text_is_refused(text):
    with pytest.raises(ValueError, match=r"room=.*: a size is a number and one of .*; pass for example '6GB'"):
        parse_size(text, name="room", example="6GB")


@pytest.mark.parametrize("size", [0, -1, "0GB", "0.5B", 2**63, "1e900", "9300PB"])
def test_parse_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match=r"size=.*: a size is from 1 to 2\*\*63 - 1 bytes"):
        parse_size(size, least=1)


@pytest.mark.parametrize("size", [True, 1.5, None, b"5GB", []])
def test_parse_size_of_another_type_is_refused(size):
    with pytest.raises(TypeError, match=r"size=.*: a size is bytes or a text; pass a number such as .*'5GB'"):
        parse_size(size)


@given(st.text())
def test_parse_size_of_any_text_is_a_size_or_an_error(text):
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert 0 <= size < 2**63


@given(st.floats(1e3, 9.99e17))
def test_format_bytes_is_read_back_by_parse_size(count):
    assert parse_size(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=0.05)


def test_format_seconds_picks_a_unit_by_size():
    assert [format_seconds(each) for each in (7.344, 0.0125, 3e-6, 12345.6)] == [
        "7.34 s",
        "12.5 ms",
        "3.0 us",
        "12,346 s",
    ]
