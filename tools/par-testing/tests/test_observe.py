import threading

import pytest

from par_testing import observe_results, wait_until


class Counter:
    def up(self, by):
        return by + 1


def test_observe_results_calls_with_each_result_until_undone():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        observe_results(patch, Counter, "up", seen.append)
        assert Counter().up(1) == 2
        assert Counter().up(by=2) == 3
    assert Counter().up(3) == 4
    assert seen == [2, 3]


def test_wait_until_returns_when_another_thread_has_acted():
    done = threading.Event()
    threading.Timer(0.01, done.set).start()
    wait_until(done.is_set, pause=0.001)
    assert done.is_set()
