"""Run with pytest-xdist, where there is one, by test_failures.py."""

import importlib.util

import pytest


@pytest.mark.ranks(2)
def test_world_in_a_worker():
    pass


def test_of_a_worker_itself(request):
    assert hasattr(request.config, "workerinput") == (importlib.util.find_spec("xdist") is not None)
