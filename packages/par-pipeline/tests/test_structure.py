"""Any nesting of tensors and plain values, taken apart and put together."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_pipeline._structure import aligned, flatten, tensors_of

Pair = namedtuple("Pair", "a b")

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.just(torch.ones(3)), st.binary()
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=8,
)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(values)
def test_a_value_comes_back_as_it_was(value):
    tensors, signature = flatten(value)
    assert same(signature.build(tensors), value)
    assert [id(each) for each in tensors] == [id(each) for each in tensors_of(value)]
    assert flatten(value, signature)[1] == signature == flatten(value)[1]


def test_signatures_differ_where_values_do_in_more_than_elements():
    x = torch.ones(2, 3)
    different = [
        x,
        x.t(),
        x.double(),
        torch.ones(2, 3, requires_grad=True),
        (x,),
        [x],
        {"a": x},
        {"b": x},
        OrderedDict(a=x),
        (x, None),
        (x, 1),
        (x, True),
        (x, x),
        Pair(x, x),
        (x, (x,)),
    ]
    signatures = [flatten(each)[1] for each in different]
    for i, one in enumerate(signatures):
        for j, other in enumerate(signatures):
            assert (one == other) == (i == j)
            tensors, found = flatten(different[j], one)
            assert found == other
            assert len(tensors) == len(found.specs)
    assert flatten(x)[1] == flatten(torch.zeros(2, 3))[1]


def test_the_size_is_that_of_aligned_tensors():
    _, signature = flatten((torch.ones(17), None, torch.ones(0), torch.ones((), dtype=torch.int64)))
    assert signature.size == aligned(68) + 0 + aligned(8) == 128 + 64


class Holder:
    def __init__(self, content):
        self.content = content


def test_a_hidden_tensor_is_refused_and_other_objects_are_not():
    assert flatten({"a": range(3)})[1].build([]) == {"a": range(3)}
    assert flatten(Holder(5))[1].build([]).content == 5
    with pytest.raises(TypeError, match="register_pytree_node"):
        flatten([Holder(torch.ones(2))])
