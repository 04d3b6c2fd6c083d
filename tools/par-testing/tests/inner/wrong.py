"""A marker that cannot be right."""

import pytest


@pytest.mark.ranks([2, 0])
def test_empty_world():
    pass
