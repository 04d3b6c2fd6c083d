"""Steps in virtual time: the host's arithmetic takes time, and so do waits for the thread that steps."""

from par_testing import host_moment, host_works, own_host_time, wait_until_moment
from par_zero.offload.offloaded import OffloadedStep
from par_zero.offload.runner import StepRunner


def host_step(size):
    """AdamW reads and writes seven numbers for each element of the parameters."""
    host_works(7 * size)


def count_host_time(patch):
    """Let the threads of steps take virtual time from now on, and waits for them, too.

    Args:
        patch: The fixture `monkeypatch`, or what one of its contexts gives.
    """
    updated, ended = {}, {}  # moments of chunks, and of runners

    def run(runner, chunks, job, original=StepRunner.run):
        def until_end():
            job()
            ended[runner] = host_moment()

        original(runner, chunks, own_host_time(until_end) if runner.is_late else job)

    def update_(step, piece, fetched, original=OffloadedStep.update_):
        original(step, piece, fetched)
        host_step(piece.tensor.nbytes)

    def finish_piece(runner, chunk, original=StepRunner.finish_piece):
        updated[chunk] = host_moment()
        original(runner, chunk)

    def wait_for(runner, chunks, original=StepRunner.wait_for):
        original(runner, chunks)
        for chunk in chunks:
            if chunk in updated:
                wait_until_moment(updated[chunk])

    def join(runner, original=StepRunner.join):
        found = original(runner)
        if found:
            wait_until_moment(ended[runner])
        return found

    patch.setattr(OffloadedStep, "update_", update_)
    for function in (run, finish_piece, wait_for, join):
        patch.setattr(StepRunner, function.__name__, function)
