"""Run with pytest-xdist by test_plugin.py."""

import pytest


@pytest.mark.ranks(2)
def test_world():
    pass


@pytest.mark.parametrize("i", range(3))
def test_plain(i):
    pass
