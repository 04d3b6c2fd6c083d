import pytest

from par_testing.report.stacks import main_thread, waits_in_collective

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 324 in wait

Current thread 0x00007f02 (most recent call first):
{frames}
"""


def dump(*frames):
    return DUMP.format(
        frames="\n".join(f'  File "{file}", line {line} in {function}' for file, line, function in frames)
    )


def test_main_thread_is_the_last():
    frames = main_thread(dump(("/home/me/test_it.py", 12, "test_it"), ("/lib/run.py", 3, "run")))
    assert [(frame.file, frame.line, frame.function) for frame in frames] == [
        ("/home/me/test_it.py", 12, "test_it"),
        ("/lib/run.py", 3, "run"),
    ]


@pytest.mark.parametrize(
    "frames",
    [
        [
            ("/x/torch/distributed/distributed_c10d.py", 5356, "barrier"),
            ("/x/torch/distributed/c10d_logger.py", 83, "w"),
        ],
        [("/x/torch/_ops.py", 1, "__call__"), ("/x/torch/distributed/_functional_collectives.py", 9, "wait_tensor")],
        [("/x/torch/autograd/graph.py", 865, "_engine_run_backward"), ("/home/me/test_it.py", 12, "test_it")],
    ],
)
def test_waiting(frames):
    assert waits_in_collective(dump(*frames))


def test_waiting_for_an_asynchronous_one(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("work = dist.all_reduce(tensor, async_op=True)\nwork.wait()\n")
    assert waits_in_collective(dump((file, 2, "test_it")))
    assert not waits_in_collective(dump((file, 1, "test_it")))


def test_busy_below_a_wrapper_of_torch_distributed():
    frames = [
        ("/home/me/model.py", 7, "forward"),
        ("/x/torch/distributed/fsdp/fully_sharded_data_parallel.py", 8, "forward"),
    ]
    assert not waits_in_collective(dump(*frames))


def test_nothing_known():
    assert not waits_in_collective("")
