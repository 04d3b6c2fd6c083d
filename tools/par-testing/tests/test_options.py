import pytest

from par_testing._options import ranks


def test_defaults():
    options = ranks(2)
    assert (options.sizes, options.listed, options.timeout) == ((2,), False, 300.0)
    assert (options.backend, options.init, options.dies) == ("gloo", True, ())


def test_list_of_sizes():
    options = ranks([1, 2])
    assert (options.sizes, options.listed) == ((1, 2), True)


def test_a_size_with_marks_of_its_own():
    options = ranks([1, pytest.param(2, marks=pytest.mark.storm)])
    assert options.sizes == (1, 2)
    assert [[mark.name for mark in marks] for marks in options.marks] == [[], ["storm"]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n": 0}, ValueError, "at least 1 rank"),
        ({"n": []}, ValueError, "runs nothing"),
        ({"n": ["2"]}, TypeError, "not '2'"),
        ({"n": [pytest.param("2")]}, TypeError, "not '2'"),
        ({"n": True}, TypeError, "not True"),
        ({"n": 2, "timeout": 0}, ValueError, "more than 0"),
        ({"n": 2, "backend": ""}, ValueError, "init=False"),
        ({"n": [4, 2], "dies": (3,)}, ValueError, "rank 3 is not in a world of 2"),
        ({"n": 2, "limit": 3}, TypeError, "limit"),
    ],
)
def test_mistakes(arguments, error, words):
    with pytest.raises(error, match=words):
        ranks(**arguments)
