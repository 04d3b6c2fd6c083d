import pytest

from par_pipeline import Action


def test_an_action_is_written_as_stage_operation_and_microbatch():
    assert str(Action("F", 2, 0)) == "2F0"
    assert Action.parse("12W345") == Action("W", 12, 345) == ("W", 12, 345)


@pytest.mark.parametrize("op", ["F", "B", "I", "W"])
def test_text_and_action_are_each_other_s_inverse(op):
    assert str(Action.parse(f"7{op}19")) == f"7{op}19"


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "-1F0", "2f0", "2SEND_F0", "2F0x", "٢F0"])
def test_what_is_no_action_is_refused_with_the_form_that_is(text):
    with pytest.raises(ValueError, match="is no action; write stage, one of F B I W, and microbatch, such as '2F0'"):
        Action.parse(text)
