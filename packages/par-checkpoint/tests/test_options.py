import pytest

from par_checkpoint._options import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("5GiB", 5 * 2**30),
        ("20KB", 20_000),
        ("1.5MB", 1_500_000),
        ("1 TB", 10**12),
        ("3KiB", 3072),
        ("2TiB", 2**41),
        ("256MiB", 2**28),
        (17, 17),
    ],
)
def test_sizes_are_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "5", "5 gb", "5gb", "5B", "GB", "-5GB", "1e3MB", "5GBs", "nanGB", "\u0665GB", " 5GB"]
)
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match="write it as '5GB'"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, -1, "0GB", "0.0001KB"])
def test_a_size_below_a_byte_is_refused(size):
    with pytest.raises(ValueError, match="less than a byte"):
        parse_size(size)


@pytest.mark.parametrize("size", [True, 1.5, None])
def test_another_type_is_refused(size):
    with pytest.raises(TypeError, match="neither a text nor bytes"):
        parse_size(size)
