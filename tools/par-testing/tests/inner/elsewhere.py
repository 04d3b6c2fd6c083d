"""A module that can be imported by the pytest process alone."""

import os

import pytest

if os.environ.setdefault("IMPORTED_IN", str(os.getpid())) != str(os.getpid()):
    raise RuntimeError("not in this process")


@pytest.mark.ranks(1)
def test_is_found_out():
    pass
