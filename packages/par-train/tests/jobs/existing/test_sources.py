"""What an existing model is trained on, as options say it."""

import pytest

from par_train._errors import UserError
from par_train.jobs.existing.sources import CorpusSource, sources_of
from par_train.jobs.options import DataOptions

KEY = "model.path is 'tiny'"


def test_one_path_needs_no_weight():
    (source,) = sources_of(DataOptions(path="a.jsonl", field="body"), KEY)
    assert source == CorpusSource(key="data.path", path="a.jsonl", weight=None, format="auto", field="body")


def test_several_have_weights_and_what_data_says_where_they_do_not():
    given = ({"path": "a.jsonl", "weight": 2, "field": "body"}, {"path": "b", "weight": 0.5, "format": "chat"})
    assert sources_of(DataOptions(sources=given, format="jsonl"), KEY) == [
        CorpusSource(key="data.sources[0]", path="a.jsonl", weight=2.0, format="jsonl", field="body"),
        CorpusSource(key="data.sources[1]", path="b", weight=0.5, format="chat", field="text"),
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "model.path is 'tiny', but data.path is missing; name the file to train on"),
        ({"path": "b", "sources": ({"path": "a", "weight": 1},)}, "data.path is 'b', and .* names 1 path; give one"),
        ({"sources": ({"path": "a"},)}, r"data.sources\[0\], 'a', has the weight None; give a number above 0"),
        ({"sources": ({"path": "a", "weight": -1},)}, "has the weight -1; give a number above 0"),
        ({"sources": ({"path": "a", "weight": True},)}, "has the weight True; give a number above 0"),
        ({"sources": ({"path": "a", "portion": 2},)}, "has 'portion'; it can have path, weight, format and field"),
        ({"sources": ({"path": "a", "weight": 1, "format": "csv"},)}, "has the format 'csv'; it can be 'auto', "),
        ({"sources": ({"path": "a", "weight": 1, "field": 3},)}, "has the field 3; give the name of a key or a column"),
        ({"sources": ({"path": "a", "weight": 1},) * 2}, "data.sources has 'a' twice; name it once"),
    ],
)
def test_what_names_no_text_is_refused(data, words):
    with pytest.raises(UserError, match=words):
        sources_of(DataOptions(**data), KEY)
