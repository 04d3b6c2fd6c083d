import threading
import time

import pytest

from par_checkpoint.transfer.workers import Workers


def test_one_worker_keeps_the_order_and_close_waits_for_all():
    done = []
    with Workers(1, "w") as workers:
        jobs = [workers.submit(lambda i=i: time.sleep(0.01 / (i + 1)) or done.append(i)) for i in range(5)]
    assert done == [0, 1, 2, 3, 4]
    assert all(job.done() for job in jobs)


def test_several_work_at_a_time():
    meeting = threading.Barrier(3, timeout=240)
    with Workers(3, "w") as workers:
        assert sorted(job.result() for job in [workers.submit(meeting.wait) for _ in range(3)]) == [0, 1, 2]


def test_an_error_is_its_jobs_alone():
    with Workers(1, "w") as workers:
        failed, good = workers.submit(lambda: 1 // 0), workers.submit(lambda: 1)
        with pytest.raises(ZeroDivisionError):
            failed.result()
        assert good.result() == 1
