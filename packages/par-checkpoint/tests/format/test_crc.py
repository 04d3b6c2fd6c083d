import random

from crc32c import crc32c

from par_checkpoint.format.crc import joined


def test_the_checksum_of_joined_bytes_is_that_of_all_of_them():
    source = random.Random(0)
    for size in (0, 1, 2, 7, 8, 255, 256, 4097, 100_000):
        first, second = source.randbytes(source.randrange(50)), source.randbytes(size)
        assert joined(crc32c(first), crc32c(second), size) == crc32c(first + second)


def test_nothing_before_changes_nothing():
    assert joined(0, crc32c(b"block"), 5) == crc32c(b"block")


def test_parts_can_be_joined_in_any_grouping():
    a, b, c = b"first", b"second part", b"third"
    of_a, of_b, of_c = crc32c(a), crc32c(b), crc32c(c)
    assert joined(joined(of_a, of_b, len(b)), of_c, len(c)) == joined(of_a, joined(of_b, of_c, len(c)), len(b + c))
