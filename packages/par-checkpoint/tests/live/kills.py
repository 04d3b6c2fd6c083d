"""Two trainer ranks publish to two generator ranks, and one of the four is killed at a drawn moment, again and again.

Run as `python kills.py COUNT SEED`, where COUNT trainers, a multiple of 5, publish two versions each. The last line of
the output has the counts of all outcomes as JSON.
"""

import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from par_checkpoint import Publisher, Receiver, Rendezvous, State
from par_checkpoint.live import holdings, source
from par_checkpoint.live.rendezvous import Transaction
from par_checkpoint.transfer.ranks import Ranks
from par_groups import Sharding, cut, whole

SHAPES = {"embed": (16, 12), "layer.up": (12, 10), "layer.down": (10, 12), "norm": (12,)}
TIMEOUT = 20.0
HEALTHY = 5  # every fifth trainer publishes without a kill, and generators must then serve its versions
TRAINERS = 0.7  # part of the kills that trainers suffer
MOMENTS = ("gather", "connect", *["send"] * 3, *["receive"] * 3, "vote", "commit")


def value(version, name):
    """The full tensor of a version. Its elements are exact in bf16, and few of them change from an odd version on."""
    base = (version + 1) // 2 * 10 + list(SHAPES).index(name)
    full = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(base)).bfloat16()
    if version % 2 == 0:
        full.view(-1)[:: 1 if name == "norm" else 7] += 8
    return full


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
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {group}, rank {rank}: %(message)s")
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
        before(holdings, "claims_of_all")
    elif moment in ("send", "receive"):
        before(Ranks, moment, count)
    elif moment == "vote":
        before(source.MemorySource, "_compare_digests")
    elif moment == "commit":
        before(Transaction, "decide")


def train(port, number, rank, death, stays=False):
    """Publish two versions, and wait until a generator has each of them; die during the second one.

    Args:
        port: Port of the store.
        number: Number of the trainer.
        rank: Rank in the trainer.
        death: Moment of its death; None: it lives.
        stays: Whether it serves further generators until it is killed.
    """
    join(port, f"trainer {number}", rank)
    state = state_of(flat, rank, torch.float32)
    with Publisher(Rendezvous(f"127.0.0.1:{port}"), state, budget=256, timeout=TIMEOUT) as publisher:
        try:
            for version in (2 * number - 1, 2 * number):
                if death is not None and version % 2 == 0:
                    die_at(*death)
                for name, tensor in state_of(flat, rank, torch.float32, version).model.items():
                    state.model[name].copy_(tensor)
                publisher.publish(version).wait(timeout=60)
            while stays:
                time.sleep(1)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)


def generate(port, number, rank, told, death):
    """Serve version after version, and report whether all tensors are of one version; die during the second one."""
    join(port, f"generator {number}", rank)
    state = state_of(rows, rank, torch.bfloat16)
    receiver = Receiver(Rendezvous(f"127.0.0.1:{port}"), state, budget=256, timeout=TIMEOUT)
    while True:
        staged = receiver.poll()
        if staged is None:
            time.sleep(0.02)
            continue
        staged.apply()
        if death is not None:
            die_at(*death)
            death = None
        is_whole = all(
            torch.equal(box.of(state.model[name]), value(receiver.version, name)[box.slices])
            for name, sharding in state.layout.items()
            for box in sharding.boxes
        )
        told.put((number, rank, receiver.version, is_whole))


class Storm:
    """Trainers and generators that are started and killed.

    Args:
        seed: Seed of the drawn moments.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch.distributed", "par_checkpoint"])
        self.told = self.context.SimpleQueue()
        # The store's threads start after the fork server, so that no process is forked next to them.
        first = self.context.Process(target=int)
        first.start()
        first.join()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.outcome, self.served, self.generation, self.generator = Counter(), {}, 0, []

    def draw(self):
        """A moment, with the number of the message before which a process is killed."""
        return self.rng.choice(MOMENTS), self.rng.randrange(1, 10)

    def start(self, act, *args):
        """Start a process."""
        process = self.context.Process(target=act, args=(self.store.port, *args), daemon=True)
        process.start()
        return process

    def restart_generator(self, deaths):
        """End the generator, and start another one.

        Args:
            deaths: Moment of each rank's death, or None.
        """
        end(self.generator)
        self.generation += 1
        self.generator = [
            self.start(generate, self.generation, rank, self.told, death) for rank, death in enumerate(deaths)
        ]

    def listen(self):
        """Read the reports of the generators."""
        while not self.told.empty():
            generation, rank, version, is_whole = self.told.get()
            self.outcome["mixtures"] += not is_whole
            self.served.setdefault((version, generation), []).append(rank)

    def has_served(self, version, seconds=60):
        """Whether both ranks of the present generator serve a version in time."""
        deadline = time.monotonic() + seconds
        while True:
            self.listen()
            if len(self.served.get((version, self.generation), [])) == 2:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def count(self, process, death):
        """Count how a process that may have been killed has ended."""
        was_killed = process.exitcode == -signal.SIGKILL
        self.outcome["kills" if was_killed else "no kill"] += 1
        if was_killed:
            self.outcome[f"killed at {death[0]}"] += 1
        print(death, "killed" if was_killed else "lives", flush=True)

    def kill_trainer(self, number):
        """Kill a rank of the trainer during an update."""
        death, victim = self.draw(), self.rng.randrange(2)
        trainers = [self.start(train, number, rank, death if rank == victim else None) for rank in range(2)]
        trainers[victim].join(90)
        self.outcome["hangs"] += trainers[victim].is_alive()
        self.count(trainers[victim], death)
        end(trainers)

    def kill_generator(self, number):
        """Kill a rank of the generator during an update; the next generator serves the version."""
        death, victim = self.draw(), self.rng.randrange(2)
        self.restart_generator([death if rank == victim else None for rank in range(2)])
        trainers = [self.start(train, number, rank, None, True) for rank in range(2)]
        deadline = time.monotonic() + 60
        while self.generator[victim].is_alive() and not self.has_served(2 * number, 0):
            if time.monotonic() > deadline:
                self.outcome["hangs"] += 1
                break
            time.sleep(0.01)
        self.count(self.generator[victim], death)
        self.listen()
        self.restart_generator([None, None])
        self.outcome["hangs"] += not self.has_served(2 * number, 90)
        end(trainers)

    def publish(self, number):
        """Publish without a kill."""
        trainers = [self.start(train, number, rank, None) for rank in range(2)]
        self.outcome["healthy versions"] += 1
        self.outcome["healthy versions served"] += self.has_served(2 * number)
        end(trainers)


def end(processes):
    """Kill processes that still run."""
    for process in processes:
        process.kill()
        process.join()


def main(versions, seed):
    """Publish pairs of versions, and print the outcomes."""
    torch.set_num_threads(1)
    storm = Storm(seed)
    storm.restart_generator([None, None])
    begin = time.monotonic()
    for number in range(1, versions + 1):
        if number % HEALTHY == 0:
            storm.publish(number)
        elif storm.rng.random() < TRAINERS:
            storm.kill_trainer(number)
        else:
            storm.kill_generator(number)
        print(number, f"{time.monotonic() - begin:.0f} s", dict(storm.outcome), flush=True)
    storm.listen()
    end(storm.generator)
    # A generator that is ended may have served its last version on one rank only.
    last = {generation: max(v for v, g in storm.served if g == generation) for _, generation in storm.served}
    storm.outcome["disagreements"] = sum(
        sorted(ranks) != [0, 1] and version < last[generation] for (version, generation), ranks in storm.served.items()
    )
    print(json.dumps({"seed": seed, **storm.outcome}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
