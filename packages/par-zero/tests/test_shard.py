"""The signature of `shard`."""

import inspect
from dataclasses import fields

from par_zero import ShardOptions, shard


def test_every_option_is_a_keyword_with_the_same_type_and_default():
    keywords = inspect.signature(shard).parameters
    for field in fields(ShardOptions):
        assert keywords[field.name].default == field.default
        assert keywords[field.name].annotation == field.type
        assert keywords[field.name].kind is inspect.Parameter.KEYWORD_ONLY
