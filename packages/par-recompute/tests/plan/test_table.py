"""What is kept if modules are called again: arithmetic on the events of a call."""

import pickle

import pytest
from hypothesis import given

from par_recompute import Made, Saved, kept

from ..tables import table, tables


def norm_and_linear():
    """x is saved by a norm; its output by a linear layer, whose output an activation function saves."""
    return table(
        (1, 10, 100),
        [Saved(0, ()), Made("norm", 0, (), 0, 5), Saved(1, (1,)), Made("fc", 1, (1,), 7, 5), Saved(2, (3,))],
    )


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [((), 111), (("norm",), 101), (("fc",), 11), (("norm", "fc"), 1), (("",), 1), (("other",), 111)],
)
def test_a_dropped_output_is_not_kept_but_the_input_of_its_module_is(dropped, expected):
    assert kept(norm_and_linear(), dropped) == expected


def test_what_a_module_saves_of_its_own_output_stays():
    # As ReLU and softmax do; what is saved afterwards is kept already, so nothing is called again for it.
    own = table((1, 10), [Saved(1, ()), Made("relu", 0, (), 0, 1), Saved(1, (1,))])
    assert kept(own, {"relu"}) == 10


def test_the_input_of_a_dropped_module_is_kept_though_autograd_does_not_need_it():
    # As of a linear layer whose weight is frozen.
    frozen = table((1, 10), [Made("fc", 0, (), 7, 1), Saved(1, (0,))])
    assert (kept(frozen, ()), kept(frozen, {"fc"})) == (10, 1)


def test_an_input_is_not_kept_for_an_output_that_nobody_saves():
    assert kept(table((1, 10), [Made("fc", 0, (), 7, 1)]), {"fc"}) == 0


def test_the_innermost_of_the_dropped_makers_is_called_again():
    nested = table((1, 10, 100), [Made("mlp.out", 1, (), 7, 1), Made("mlp", 0, (), 9, 1), Saved(2, (0, 1))])
    assert [kept(nested, names) for names in ({"mlp.out"}, {"mlp"}, {"mlp", "mlp.out"})] == [10, 1, 10]


@given(tables())
def test_with_nothing_dropped_each_saved_storage_counts_once(table):
    saved = {event.storage for event in table.events if isinstance(event, Saved)}
    assert kept(table, ()) == sum(table.sizes[storage] for storage in saved)
    assert kept(table, {""}) == table.sizes[0]


@given(tables())
def test_a_table_is_pickled_and_printed(table):
    assert pickle.loads(pickle.dumps(table)) == table
    assert len(str(table).splitlines()) == len(table.modules) + 2
