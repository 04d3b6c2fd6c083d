import pytest
import torch.distributed as dist

from par_testing import for_each, storm


def test_every_combination_is_called_in_the_order_of_the_product():
    seen = []
    for_each(letter="ab", number=(1, 2))(lambda letter, number: seen.append((letter, number)))()
    assert seen == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


@pytest.mark.parametrize("kind", [AssertionError, pytest.fail.Exception])
def test_a_failure_says_with_which_values_and_ends_the_test(kind):
    seen = []

    def body(number):
        seen.append(number)
        if number == 2:
            raise kind("this one")

    with pytest.raises(kind, match="this one") as caught:
        for_each(number=(1, 2, 3))(body)()
    assert caught.value.__notes__ == ["with {'number': 2}"]
    assert seen == [1, 2]


def test_combinations_with_a_value_that_is_a_storm_are_a_test_of_their_own():
    seen = []

    def body(letter, number):
        seen.append((letter, number))

    test = for_each(letter=("a", storm("b")), number=(1, 2))(body)
    [mark] = test.pytestmark
    typical, others = mark.args[1]
    assert [each.name for each in others.marks] == ["storm"]
    test(storm=typical)
    assert seen == [("a", 1), ("a", 2)]
    test(storm=others.values[0])
    assert seen[2:] == [("b", 1), ("b", 2)]


def test_storm_as_decorator_raises():
    with pytest.raises(TypeError, match=r"storm\(test_x\): it marks values; decorate a test with @pytest.mark.storm"):

        @storm
        def test_x():
            pass


@for_each(shift=(1, storm(10)))
@pytest.mark.parametrize("base", [100, 200])
@pytest.mark.ranks(2)
def test_it_goes_with_parameters_and_ranks(base, shift):
    assert base in {100, 200}
    assert shift in {1, 10}
    assert dist.get_world_size() == 2
