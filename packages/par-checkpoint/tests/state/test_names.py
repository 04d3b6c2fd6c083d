import pytest

from par_checkpoint.state.names import rename

KEYS = ["embed.weight", "layers.0.w", "layers.1.w"]


def test_without_names_nothing_changes():
    assert rename(None, KEYS) == dict(zip(KEYS, KEYS, strict=True))


def test_a_mapping_leaves_other_names_as_they_are():
    renamed = rename({"embed.weight": "wte"}, KEYS)
    assert renamed == {"embed.weight": "wte", "layers.0.w": "layers.0.w", "layers.1.w": "layers.1.w"}


def test_a_mapping_may_swap_two_names():
    assert rename({"a": "b", "b": "a"}, ["a", "b"]) == {"a": "b", "b": "a"}


def test_expressions_apply_one_after_the_other():
    renamed = rename([(r"^layers\.(\d+)", r"h.\1"), (r"\.w$", ".weight"), (r"^h", "model.h")], KEYS)
    assert list(renamed.values()) == ["embed.weight", "model.h.0.weight", "model.h.1.weight"]


def test_a_function_names_every_tensor():
    assert list(rename(str.upper, KEYS).values()) == ["EMBED.WEIGHT", "LAYERS.0.W", "LAYERS.1.W"]


@pytest.mark.parametrize("names", [{"a": "c", "b": "c"}, {"a": "b"}, [("a|b", "c")], lambda key: "c"])
def test_two_tensors_cannot_share_a_name(names):
    with pytest.raises(ValueError, match=r"maps both 'a' and 'b' to '[bc]'; each tensor needs"):
        rename(names, ["a", "b"])


def test_a_mapping_may_name_tensors_of_other_ranks():
    renamed = rename({"embed.weight": "wte", "head.weight": "lm_head"}, KEYS)
    assert renamed == {"embed.weight": "wte", "layers.0.w": "layers.0.w", "layers.1.w": "layers.1.w"}


@pytest.mark.parametrize("pair", [("(", "x"), ("e", r"\1")])
def test_a_broken_expression_is_shown(pair):
    with pytest.raises(ValueError, match="in names is not a regular expression and its replacement"):
        rename([pair], KEYS)


@pytest.mark.parametrize("names", [7, "ab", [("a",)], [("a", 1)], ["ab"], {"embed.weight": 1}, lambda key: None])
def test_what_is_no_renaming_is_refused(names):
    with pytest.raises(TypeError, match="names"):
        rename(names, KEYS)
