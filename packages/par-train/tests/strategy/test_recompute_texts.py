"""What can be said of activations that are computed again."""

import pytest

from par_recompute import Drop, Keep, Layers, Ops
from par_train.strategy.settings import policy_of


def test_a_text_says_what_an_object_does():
    assert policy_of(None) is None
    assert policy_of("") is None
    assert policy_of("cheap") == "cheap"
    assert policy_of("layers") == Layers()
    assert policy_of("layers:3") == Layers(3)
    assert policy_of("keep:0.4") == Keep(0.4)
    assert policy_of("keep:1") == Keep(1.0)
    assert policy_of("keep:6GB") == Keep(6_000_000_000)
    assert policy_of("keep:1.5 GiB") == Keep(3 << 29)
    for policy in (Layers(2), Keep("6GB"), Drop(lambda name, module: True), Ops([])):
        assert policy_of(policy) is policy


@pytest.mark.parametrize("given", ["cheep", "cheap:2", "layers:0", "layers:x", "keep", "keep:2", "keep:6GX", "none", 3])
def test_something_else_is_refused_with_what_it_can_be(given):
    with pytest.raises(ValueError, match=r"recompute=.* pass .*'cheap', 'layers'"):
        policy_of(given)
