import pytest

from par_checkpoint import CorruptError
from par_checkpoint.format.strict_json import is_count, parse_object, text_map


def test_plain_json_is_read():
    assert parse_object(b'{"a": [1, {"b": null}]}', "x") == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[1]", "holds a JSON list"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' is there twice"),
        (b'{"a": Infinity}', "Infinity is no JSON"),
        (b"\xff", "not the JSON"),
        (b"{", "not the JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep"),
    ],
)
def test_anything_else_is_refused_in_words(data, what):
    with pytest.raises(CorruptError, match=rf"^x: .*{what}"):
        parse_object(data, "x")


def test_a_map_has_texts_alone():
    assert text_map({"a": "b"}, "x") == {"a": "b"}
    for value in ([], {"a": 1}, {"a": None}):
        with pytest.raises(CorruptError, match=r"^x: "):
            text_map(value, "x")


def test_counts_are_whole_and_not_negative():
    assert [is_count(value) for value in (0, 3, -1, True, 1.0, "1", None)] == [True, True, *[False] * 5]
