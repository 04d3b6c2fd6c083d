from fractions import Fraction

import pytest

from par_testing import received_per_rank


@pytest.mark.parametrize(
    ("op", "received"),
    [
        ("all_reduce", 18),
        ("all_gather", 9),
        ("reduce_scatter", 9),
        ("all_to_all", 9),
        ("broadcast", 9),
        ("reduce", 9),
        ("gather", Fraction(9, 4)),
        ("scatter", Fraction(9, 4)),
        ("send", 0),
        ("recv", 12),
        ("barrier", 0),
    ],
)
def test_twelve_elements_on_four_ranks(op, received):
    assert received_per_rank(op, 12, 4) == received


def test_exact_where_it_is_no_integer():
    assert received_per_rank("all_reduce", 5, 3) == Fraction(20, 3)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "gather"])
def test_one_rank_receives_nothing(op):
    assert received_per_rank(op, 12, 1) == 0


def test_unknown():
    with pytest.raises(ValueError, match="no convention says what 'teleport' moves"):
        received_per_rank("teleport", 1, 2)
