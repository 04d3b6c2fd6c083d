"""Two trainer ranks publish to two generator ranks, and one trainer rank is killed at a drawn moment, again and again.

Run as `python kills.py VERSIONS SEED`, with a multiple of 5 versions. It prints the counts of all outcomes as JSON.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from par_checkpoint import Publisher, Receiver, Rendezvous, State
from par_checkpoint.live import source
from par_checkpoint.live.rendezvous import Transaction
from par_checkpoint.transfer.ranks import Ranks
from par_groups import Sharding, cut, whole

SHAPES = {"embed": (16, 12), "layer.up": (12, 10), "layer.down": (10, 12), "norm": (12,)}
TIMEOUT = 20.0
HEALTHY = 5  # every fifth version is published without a kill, and generators must then serve it
MOMENTS = ("gather", "connect", *["send"] * 6, "vote", "commit")


def value(version, name):
    """The full tensor of a version. Its elements are exact in bf16."""
    seed = version * 10 + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)).bfloat16()


def flat(shape, rank):
    """The sharding of a trainer rank: an uneven slice of the flat tensor."""
    size = torch.Size(shape).numel()
    edge = size * 2 // 5
    return cut(whole(shape, (0, 1)), *((0, edge) if rank == 0 else (edge, size)))


def rows(shape, rank):
    """The sharding of a generator rank: half of the rows, or a full vector."""
    if len(shape) == 1:
        return whole(shape, (0, 1))
    half = whole((shape[0] // 2, *shape[1:]), (rank,)).boxes[0]
    return Sharding(shape, (type(half)((rank * shape[0] // 2, 0), half.size, 0, half.stride, (rank,)),))


def state_of(sharding_of, rank, dtype, version=None):
    """The state of a rank, with the values of a version."""
    layout = {name: sharding_of(shape, rank) for name, shape in SHAPES.items()}
    model = {name: torch.zeros(sum(box.numel for box in each.boxes), dtype=dtype) for name, each in layout.items()}
    for name, each in layout.items():
        for box in each.boxes if version is not None else ():
            box.of(model[name]).copy_(value(version, name)[box.slices])
    return State(model=model, layout=layout)


def join(port, group, rank):
    """Join the world of a trainer or of a generator."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=PrefixStore(group, store), rank=rank, world_size=2)


def die_at(moment, count):
    """Arrange that this process is killed at a moment of its next update."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name, calls=1):
        real, left = getattr(owner, name), [calls]

        def called(*args, **keywords):
            left[0] -= 1
            if not left[0]:
                die()
            return real(*args, **keywords)

        setattr(owner, name, called)

    if moment == "gather":
        before(Transaction, "gather")
    elif moment == "connect":
        before(source, "claims_of_all")
    elif moment == "send":
        before(Ranks, "send", count)
    elif moment == "vote":
        before(source.MemorySource, "_compare_digests")
    elif moment == "commit":
        before(Transaction, "decide")


def train(port, version, rank, death):
    """Publish one version, and wait until a generator has it."""
    join(port, f"trainer {version}", rank)
    if death is not None:
        die_at(*death)
    with Publisher(
        Rendezvous(f"127.0.0.1:{port}"), state_of(flat, rank, torch.float32, version), budget=256, timeout=TIMEOUT
    ) as publisher:
        try:
            publisher.publish(version).wait(timeout=60)
        finally:
            os._exit(0)


def generate(port, rank, last, told):
    """Serve version after version, and tell which one every tensor is of."""
    join(port, "generator", rank)
    state = state_of(rows, rank, torch.bfloat16)
    receiver = Receiver(Rendezvous(f"127.0.0.1:{port}"), state, budget=256, timeout=TIMEOUT)
    while receiver.version != last:
        staged = receiver.poll()
        if staged is None:
            time.sleep(0.02)
            continue
        staged.apply()
        version = receiver.version
        is_whole = all(
            torch.equal(box.of(state.model[name]), value(version, name)[box.slices])
            for name, sharding in state.layout.items()
            for box in sharding.boxes
        )
        told.put((rank, version, is_whole))
    os._exit(0)


def main(versions, seed):
    """Publish the versions, and print the outcomes."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "par_checkpoint"])
    told = context.SimpleQueue()
    # The store's threads start after the fork server, so that no process is forked next to them.
    first = context.Process(target=int)
    first.start()
    first.join()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generators = [
        context.Process(target=generate, args=(store.port, rank, versions, told), daemon=True) for rank in range(2)
    ]
    for process in generators:
        process.start()
    outcome, waits, served = Counter(), [], {}

    def receive_reports():
        while not told.empty():
            rank, version, is_whole = told.get()
            outcome["mixtures"] += not is_whole
            served.setdefault(version, []).append(rank)

    for version in range(1, versions + 1):
        death = None if version % HEALTHY == 0 else (rng.choice(MOMENTS), rng.randrange(1, 20))
        victim = rng.randrange(2)
        trainers = [
            context.Process(
                target=train, args=(store.port, version, rank, death if rank == victim else None), daemon=True
            )
            for rank in range(2)
        ]
        begin = time.monotonic()
        for process in trainers:
            process.start()
        watched = trainers[victim]
        watched.join(60)
        outcome["hangs"] += watched.is_alive()
        was_killed = watched.exitcode == -signal.SIGKILL
        outcome["kills" if was_killed else "no kill"] += 1
        if death is not None and was_killed:
            outcome[f"killed at {death[0]}"] += 1
        if not was_killed:
            trainers[1 - victim].join(30)
        for process in trainers:
            process.kill()
            process.join()
        deadline = time.monotonic() + 60
        while death is None and len(served.get(version, [])) < 2 and time.monotonic() < deadline:
            receive_reports()
            time.sleep(0.01)
        if death is None:
            outcome["healthy versions served"] += len(served.get(version, [])) == 2
            outcome["healthy versions"] += 1
            waits.append(time.monotonic() - begin)
    receive_reports()
    for process in generators:
        process.join(60)
        outcome["hangs"] += process.is_alive()
    outcome["disagreements"] = sum(sorted(ranks) != [0, 1] for ranks in served.values())
    outcome["versions of killed trainers served"] = sum(version % HEALTHY != 0 for version in served)
    print(json.dumps({"seed": seed, **outcome, "slowest healthy version, s": round(max(waits), 2)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
