"""One rank of a small loop in which the last rank has a fault at one step: `planted.py FAULT FOLDER`.

All ranks end as soon as the line is reported, because a hang would last for ever.
"""

import errno
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from par_diagnosis import Watchdog
from par_groups import ProcessGroups, Topology, launch

TIMEOUT = 1.0
FAULT_STEP = 3
COLLECTIVE_TIMEOUT = 300


def reduce_gradients(group, elements=6):
    dist.all_reduce(torch.ones(elements), group=group)  # reduces


def sum_losses(group):
    dist.all_reduce(torch.ones(6), group=group)  # sums


def gather_flags(group):
    dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size(group))], torch.ones(2), group=group)  # gathers


def step(group):
    reduce_gradients(group)
    sum_losses(group)
    gather_flags(group)


# The faults: what the guilty rank does instead of its step.


def missing(group, **_):
    """The next collective fits by accident."""
    sum_losses(group)
    gather_flags(group)


def order(group, **_):
    reduce_gradients(group)
    gather_flags(group)
    sum_losses(group)


def shape(group, **_):
    """gloo ends a rank that gets more bytes than it expects by a signal."""
    reduce_gradients(group)
    sum_losses(group)
    dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size(group))], torch.ones(1), group=group)  # short


def dead(**_):
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(**_):
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeping(group, **_):
    time.sleep(60)  # sleeps
    step(group)


def slow_data(activity, group, **_):
    activity.update(FAULT_STEP, "data")
    next(read_slowly())
    step(group)


def read_slowly():
    while True:
        time.sleep(60)  # reads
        yield


def blocked(group, **_):
    lock = threading.Lock()
    with lock:
        lock.acquire()  # blocks
    step(group)


def spins(group, **_):
    while True:  # spins
        sum(range(100))


def nan(activity, group, **_):
    """A rank that leaves a step whose loss is not a number, by itself."""
    reduce_gradients(group)
    activity.log({"loss": torch.tensor(float("nan"))})


def full_disk(**_):
    raise OSError(errno.ENOSPC, "No space left on device", "/data/step-3")  # writes


def config(group, **_):
    """Half a batch more than the others: another number of microbatches, and so of collectives."""
    step(group)
    reduce_gradients(group)


def ended(**_):
    """Its data are at an end."""


FAULTS = (missing, order, shape, dead, stopped, sleeping, slow_data, blocked, spins, nan, full_disk, config, ended)


def train(fault, folder, groups, rank, world):
    guilty = rank == world - 1
    facts = {"microbatches": 3 if guilty and fault is config else 2}
    patience = 8.0 if fault in (dead, stopped, shape, ended) else 60.0  # of those ranks nobody answers

    def report(text):
        if (folder / "ending").exists():  # a rank that goes because all was told is no fault
            return
        if "par-diagnosis: error" not in text and not all_are_there(
            folder, world
        ):  # one is late, as the machine is busy
            return
        print(watchdog._exchange._number, text, flush=True)
        (folder / "told.new").write_text(text)
        (folder / "told.new").replace(folder / "told")

    with Watchdog(
        folder / "diagnosis", groups, timeout=TIMEOUT, facts=facts, report=report, patience=patience
    ) as watchdog:
        for number in range(FAULT_STEP + 9):
            watchdog.activity.update(number, "step")
            if guilty and number == FAULT_STEP:
                (folder / "planted").touch()
                fault(group=groups["data"], activity=watchdog.activity)
                if fault is ended:
                    return
            else:
                step(groups["data"])


def all_are_there(folder, world):
    """Whether the fault has happened, and the others have come to its step, as those who have just met wrote it."""
    dumps = [json.loads((folder / "diagnosis" / f"rank-{rank}.json").read_text()) for rank in range(world - 1)]
    return (folder / "planted").exists() and all(dump["step"] >= FAULT_STEP for dump in dumps)


def end_when_told(folder):
    while not (folder / "told").exists():
        time.sleep(0.02)
    time.sleep(0.3)  # for the details, which are written after the line
    (folder / "ending").touch()
    os._exit(0)


def main():
    fault = next(each for each in FAULTS if each.__name__ == sys.argv[1])
    folder = Path(sys.argv[2])
    threading.Thread(target=end_when_told, args=(folder,), daemon=True).start()
    with launch(timeout=COLLECTIVE_TIMEOUT, device="cpu") as here:
        groups = ProcessGroups(Topology.from_config({}, here.world_size))
        with suppress(RuntimeError, OSError):
            train(fault, folder, groups, here.rank, here.world_size)
        end_when_told(folder)


if __name__ == "__main__":
    main()
