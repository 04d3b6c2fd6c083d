"""Traces as data: what they refuse, and that a file gives the same ones back."""

import pytest
from hypothesis import given

from par_zero import Moment, Trace

from .cases import traces


@given(case=traces())
def test_a_trace_is_read_as_it_was_written(case):
    trace, _, _ = case
    assert Trace.from_json(trace.to_json()) == trace


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
def test_what_no_moment_is(given_, words):
    with pytest.raises(ValueError, match=words):
        Moment(**given_)


@pytest.mark.parametrize(
    "text", ["[]", '{"moments":3}', '{"moments":[["forward","a"]]}', '{"moments":[["step",null,0,[1]]]}']
)
def test_a_text_of_something_else_is_refused(text):
    with pytest.raises(ValueError, match=r"is no (trace|moment of a trace); give what Trace.to_json\(\) has written"):
        Trace.from_json(text)
