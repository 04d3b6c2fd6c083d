"""Moments as data: which of them raise."""

import pytest

from par_zero import Moment


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"kind": "fly", "unit": "h.0"}, "kind is 'fly'; it can be 'forward', 'backward' or 'step'"),
        ({"kind": "forward"}, "a 'forward' has unit None; give forward and backward a unit, a step none"),
        ({"kind": "step", "unit": "h.0"}, "a 'step' has unit 'h.0'; give forward"),
        ({"kind": "step", "held": ("h.0",)}, r"a 'step' has held \('h.0',\); a step needs no units, so leave held out"),
        ({"kind": "forward", "unit": "h.0", "other": -1}, "other is -1 bytes; give 0 or more"),
    ],
)
def test_moment_that_is_none_raises(given_, words):
    with pytest.raises(ValueError, match=words):
        Moment(**given_)
