import pytest

from ._hosts import two_hosts


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as made:
        yield made
