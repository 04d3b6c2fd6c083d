"""Weights that generators take from a trainer in complete versions."""

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Publisher, Receiver, Rendezvous, State
from par_checkpoint.live.rendezvous import Transaction, TransactionAborted

from .cuts import sharded
from .kills import MOMENTS, die_at

SHAPES = {"embed": (12, 6), "layer": (8, 10), "norm": (8,)}


def full(version, name):
    """The full tensor of a version; its elements are exact in bf16, and differ between versions."""
    return torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name]) % 16 + 16.0 * version


def part(version, rank, dim, dtype):
    """The state of one of two ranks, which shard dim `dim`, the last one if a tensor has fewer."""
    model, layout = {}, {}
    for name, shape in SHAPES.items():
        along = min(dim, len(shape) - 1)
        start, size = [0] * len(shape), list(shape)
        start[along], size[along] = rank * shape[along] // 2, shape[along] // 2
        model[name], layout[name] = sharded(shape, [(tuple(start), tuple(size))], rank, dtype)
        for box in layout[name].boxes:
            box.of(model[name]).copy_(full(version, name)[box.slices])
    return State(model=model, layout=layout)


def served(state):
    """The version of which this rank has every element, or "mixture"."""
    found = set()
    for name, tensor in state.model.items():
        for box in state.layout[name].boxes:
            versions = [v for v in range(-1, 9) if torch.equal(box.of(tensor).float(), full(v, name)[box.slices])]
            found.add(versions[0] if versions else "mixture")
    return found.pop() if len(found) == 1 else "mixture"


def polled(receiver, seconds=30):
    """The next staged version."""
    deadline = time.monotonic() + seconds
    while (staged := receiver.poll()) is None:
        assert time.monotonic() < deadline, "no version has arrived"
        time.sleep(0.01)
    return staged


@pytest.fixture
def rendezvous():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Rendezvous(f"127.0.0.1:{store.port}"), store
    del store


def test_rendezvous_without_a_port_raises():
    for address in ("localhost", "localhost:70000", 3):
        with pytest.raises(ValueError, match=f"address={address!r}: not a host and a port"):
            Rendezvous(address)


@pytest.mark.ranks(4, timeout=120)
def test_receiver_serves_each_published_version_complete():
    rank = dist.get_rank()
    trainers, generators = dist.new_group([0, 1]), dist.new_group([2, 3])
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [f"127.0.0.1:{hosted.port}" if hosted else None]
    dist.broadcast_object_list(address)
    at = Rendezvous(address[0])
    if rank < 2:
        state = part(0, rank, 0, torch.float32)
        with Publisher(at, state, group=trainers, timeout=30) as publisher:
            for version in (1, 2):
                for name, tensor in part(version, rank, 0, torch.float32).model.items():
                    state.model[name].copy_(tensor)
                published = publisher.publish(version)
                for tensor in state.model.values():
                    tensor.zero_()  # the trainer continues
                published.wait(timeout=30)
                dist.barrier()
            dist.barrier()
    else:
        state = part(0, rank - 2, 1, torch.bfloat16)
        with Receiver(at, state, group=generators, timeout=30) as receiver:
            assert receiver.version is None
            for version in (1, 2):
                staged = polled(receiver)
                assert served(state) == version - 1  # what is served changes in `apply` only
                assert staged.version == version
                dist.barrier()
                staged.apply()
                assert receiver.version == version
                assert served(state) == version
            assert receiver.poll() is None
            dist.barrier()


@pytest.mark.ranks(2, timeout=60)
def test_publisher_of_ranks_that_disagree_raises_on_all():
    rank = dist.get_rank()
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [f"127.0.0.1:{hosted.port}" if hosted else None]
    dist.broadcast_object_list(address)
    at, state = Rendezvous(address[0]), State(model={"a": torch.ones(3)})
    for given in ({"keep": rank}, {"dtype": (None, torch.float16)[rank]}, {"at": Rendezvous(address[0], f"{rank}")}):
        with pytest.raises(ValueError, match=r"is .* on rank 0, and .* on rank 1; give the same on all ranks"):
            Publisher(**{"at": at, "state": state, **given})
    with Publisher(at, state) as publisher:
        with pytest.raises(ValueError, match="version is 1 on rank 0, and 2 on rank 1"):
            publisher.publish(1 + rank)
        publisher.publish(1)
        dist.barrier()


@pytest.mark.ranks(3, timeout=60)
def test_publisher_closed_on_one_rank_delays_no_other_process():
    """The ranks of a trainer end at different moments. Without the note of the first one, the others wait 100 s."""
    rank = dist.get_rank()
    trainers, generator = dist.new_group([0, 1]), dist.new_group([2])
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [f"127.0.0.1:{hosted.port}" if hosted else None]
    dist.broadcast_object_list(address)
    at, state = Rendezvous(address[0]), State(model={"a": torch.ones(3)})
    if rank < 2:
        publisher = Publisher(at, state, group=trainers, timeout=100)
        publisher.publish(1)
        if rank == 1:
            publisher.close()
    dist.barrier()
    if rank == 2:
        with Receiver(at, state, group=generator, timeout=100) as receiver:
            time.sleep(0.2)
            assert receiver.poll() is None
    dist.barrier()
    if rank == 0:
        publisher.close()
    dist.barrier()


def test_a_version_cannot_be_cast_to_integers(rendezvous):
    for dtype in (torch.int8, "bfloat16"):
        with pytest.raises(ValueError, match=r"dtype=.*: weights need a floating-point dtype; pass bfloat16 or None"):
            Publisher(rendezvous[0], State(model={"a": torch.ones(3)}), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "served"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float16, torch.float32)],
)
def test_receiver_takes_values_that_its_dtype_lacks(rendezvous, dtype, served):
    """A digest of the values before a cast that rounds them would abort each update, again and again."""
    given = torch.tensor([float("nan"), 1e6, 1e-9, 1.001])
    model = {"a": torch.zeros(4, dtype=served)}
    with (
        Publisher(rendezvous[0], State(model={"a": given}), dtype=dtype, timeout=20) as publisher,
        Receiver(rendezvous[0], State(model=model), timeout=20) as receiver,
    ):
        for version in (1, 2):
            given[3] += version
            publisher.publish(version)
            polled(receiver).apply()
            torch.testing.assert_close(model["a"], given.to(dtype).to(served), rtol=0, atol=0, equal_nan=True)


def test_exchange_of_bad_arguments_raises(rendezvous):
    at, _ = rendezvous
    model = {"a": torch.ones(2)}
    for make in (Publisher, Receiver):
        for given, text in (
            ((at.address, State(model=model)), "at is a str; pass a par_checkpoint.Rendezvous"),
            ((at, model), "state is a dict; pass a par_checkpoint.State"),
            ((at, State(model=3)), "model is a int"),
        ):
            with pytest.raises(TypeError, match=text):
                make(*given)
    publisher = Publisher(at, State(model=model))
    with pytest.raises(TypeError, match="version=True: it must be an int"):
        publisher.publish(True)
    with pytest.raises(TypeError, match="generators='all': not a number of generators"):
        publisher.publish(1).wait(generators="all")
    with pytest.raises(ValueError, match="generators=-1: not a number of generators; pass 0 or more"):
        publisher.publish(2).wait(generators=-1)
    publisher.close()
    with pytest.raises(CheckpointError, match="this publisher is closed, so nobody would receive"):
        publisher.publish(2)


def test_apply_to_a_model_that_has_changed_raises(rendezvous):
    at, _ = rendezvous
    given = {"a": torch.ones(2), "b": torch.full((3,), 1 + 2j, dtype=torch.complex128)}
    served = {name: torch.zeros_like(each) for name, each in given.items()}
    with Publisher(at, State(model=given)) as publisher, Receiver(at, State(model=served)) as receiver:
        publisher.publish(1)
        staged = polled(receiver)
        served["b"] = torch.zeros(4, dtype=torch.complex128)
        with pytest.raises(CheckpointError, match="other names, shapes or shards than when the Receiver was made"):
            staged.apply()
        assert not served["a"].any()
        assert receiver.version is None
        served["b"] = torch.zeros(3, dtype=torch.complex128)
        staged.apply()
        assert torch.equal(served["b"], given["b"])
        with pytest.raises(CheckpointError, match="version 1 was applied before"):
            staged.apply()


def test_receiver_without_ranks_takes_full_tensors(rendezvous):
    at, _ = rendezvous
    trained = {name: full(3, name) for name in SHAPES}
    state = State(model={name: torch.zeros(shape) for name, shape in SHAPES.items()})
    with Publisher(at, State(model=trained), dtype=None, timeout=20) as publisher:
        publisher.publish(3)
        with Receiver(at, state, timeout=20) as receiver:
            staged = polled(receiver)
            assert {name: tensor.shape for name, tensor in staged.tensors()} == SHAPES
            staged.accept()
            assert receiver.version == 3
            assert not state.model["norm"].any()  # another program has taken the values
            with pytest.raises(CheckpointError, match="was applied before"):
                staged.apply()
        for version in (2.5, "4"):
            with pytest.raises(TypeError, match=r"version=.*: it must be an int; pass one"):
                publisher.publish(version)
        with pytest.raises(ValueError, match="3 is published; pass a larger number"):
            publisher.publish(3)


def test_receiver_that_is_closed_as_a_version_arrives_ends(rendezvous, monkeypatch):
    at, _ = rendezvous
    with Publisher(at, State(model={"a": torch.ones(3)})) as publisher:
        receiver = Receiver(at, State(model={"a": torch.zeros(3)}))
        clear, closing = receiver._is_free.clear, []

        def closed_first():
            closing.append(threading.Thread(target=receiver.close))
            closing[0].start()
            while not receiver._closing.is_set():
                time.sleep(0.001)
            time.sleep(0.1)
            clear()

        monkeypatch.setattr(receiver._is_free, "clear", closed_first)
        publisher.publish(1).wait(timeout=30)
        receiver._thread.join(30)
        assert not receiver._thread.is_alive()


def test_wait_for_a_version_ends_when_the_publisher_is_closed(rendezvous):
    publisher = Publisher(rendezvous[0], State(model={"a": torch.ones(3)}), timeout=5)
    published = publisher.publish(1)
    closing = threading.Timer(0.2, publisher.close)
    closing.start()
    begin = time.monotonic()
    for _ in range(2):  # during the call and before it
        with pytest.raises(CheckpointError, match="this publisher was closed, and fewer than 1 generators"):
            published.wait(timeout=60)
    assert time.monotonic() - begin < 30
    closing.join()


def test_publish_in_several_threads_offers_one_version_after_the_other(rendezvous):
    at, model, versions, lock = rendezvous[0], {"a": torch.zeros(3)}, iter(range(1, 61)), threading.Lock()
    failed = []
    with Publisher(at, State(model={"a": torch.ones(3)}), timeout=20) as publisher:

        def publish():
            for _ in range(20):
                with lock:
                    version = next(versions)
                try:
                    with contextlib.suppress(ValueError):  # another thread has published a later version
                        publisher.publish(version)
                except Exception as error:
                    failed.append(error)

        threads = [threading.Thread(target=publish) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        with Receiver(at, State(model=model), timeout=20) as receiver:
            assert polled(receiver).version == 60


@pytest.mark.parametrize("budgets", [("64KB", "256MB"), ("256MB", "64KB")])
def test_update_between_different_budgets_moves_all(rendezvous, budgets):
    """Each end cut the tensor into messages of its own size, and gloo ends a process for which one is too long."""
    given, served = torch.arange(100_000.0), torch.zeros(100_000)
    publisher = Publisher(rendezvous[0], State(model={"a": given}), dtype=None, budget=budgets[0], timeout=20)
    receiver = Receiver(rendezvous[0], State(model={"a": served}), budget=budgets[1], timeout=20)
    with publisher, receiver:
        publisher.publish(1)
        polled(receiver).apply()
    assert torch.equal(served, given)


def test_publisher_of_two_at_one_rendezvous_raises_on_the_older(rendezvous):
    at, _ = rendezvous
    state = State(model={"a": torch.ones(3)})
    with Publisher(at, state, timeout=20) as older, Publisher(at, state, timeout=20) as newer:
        newer.publish(1)
        with pytest.raises(CheckpointError, match="another publisher has taken over 'weights'"):
            older.publish(2)


def test_transaction_that_a_process_left_is_not_joined_late(rendezvous):
    at, _ = rendezvous
    early, late = (Transaction(at.open(), 0, 1) for _ in range(2))
    with pytest.raises(TransactionAborted, match=r"waited 0.05 s for 2 processes"):
        early.gather(2, 0.05)
    at.open().set("0/closed", "")
    with pytest.raises(TransactionAborted, match="the publisher is closed or replaced"):
        Transaction(at.open(), 0, 2).gather(2, 30)
    # The late process is the second one, but the first one does not wait for it any more.
    with pytest.raises(TransactionAborted, match="given up before all had come"):
        late.gather(2, 20)


def test_receiver_with_another_vocabulary_raises_and_changes_nothing(rendezvous):
    at, _ = rendezvous
    state = State(model={"embed": torch.zeros(5, 2)})
    with Publisher(at, State(model={"embed": torch.ones(4, 2)}), timeout=20) as publisher:
        publisher.publish(1)
        with (
            Receiver(at, state, timeout=20) as receiver,
            pytest.raises(CheckpointError, match=r"(?s)do not fit the generator's.*'embed' is torch.bfloat16 \(4, 2\)"),
        ):
            polled(receiver)
        assert not state.model["embed"].any()
        with Receiver(at, State(model={"embed": torch.zeros(4, 2)}), timeout=20) as receiver:  # others can still come
            assert polled(receiver).version == 1


def test_receiver_that_comes_late_takes_the_newest_version(rendezvous):
    at, _ = rendezvous
    state = State(model={"a": torch.ones(3)})
    other = State(model={"a": torch.zeros(3)})
    with Publisher(at, state, timeout=20) as publisher:
        for version in (1, 2, 5):
            state.model["a"].fill_(version)
            publisher.publish(version)
        with Receiver(at, other, timeout=20) as receiver:
            polled(receiver).apply()
            assert receiver.version == 5
            assert other.model["a"].tolist() == [5, 5, 5]


def test_publisher_does_not_wait_for_a_generator_that_serves(rendezvous):
    at, _ = rendezvous
    state, other = State(model={"a": torch.ones(3)}), State(model={"a": torch.zeros(3)})
    with Publisher(at, state, timeout=20) as publisher, Receiver(at, other, timeout=20) as receiver:
        publisher.publish(1)
        staged = polled(receiver)
        for version in (2, 3):  # the generator is in a long batch
            state.model["a"].fill_(version)
            publisher.publish(version)
        staged.apply()
        assert other.model["a"].tolist() == [1, 1, 1]
        polled(receiver).apply()
        assert receiver.version == 3


def test_receiver_that_joins_between_versions_takes_the_same_ones(rendezvous):
    at, _ = rendezvous
    state = State(model={"a": torch.ones(3)})
    models = [{"a": torch.zeros(3)} for _ in range(3)]
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher(at, state, timeout=20))
        receivers = []
        for version, model in enumerate(models):  # one more generator for each version
            receivers.append(stack.enter_context(Receiver(at, State(model=model), timeout=20)))
            state.model["a"].fill_(version)
            publisher.publish(version)
            for receiver in receivers:
                while receiver.version != version:
                    polled(receiver).apply()
            assert all(each["a"].tolist() == [version] * 3 for each in models[: version + 1])


def test_publisher_that_takes_over_may_publish_the_same_version(rendezvous):
    at, _ = rendezvous
    other = State(model={"a": torch.zeros(3)})
    with Receiver(at, other, timeout=20) as receiver:
        for value in (1.0, 2.0):  # a trainer is restarted from a checkpoint
            with Publisher(at, State(model={"a": torch.full((3,), value)}), timeout=20) as publisher:
                publisher.publish(7)
                polled(receiver).apply()
                assert other.model["a"].tolist() == [value] * 3


def test_receiver_keeps_its_version_when_the_store_is_lost():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at = Rendezvous(f"127.0.0.1:{store.port}")
    state, other = State(model={"a": torch.ones(3)}), State(model={"a": torch.zeros(3)})
    with Publisher(at, state, timeout=5) as publisher, Receiver(at, other, timeout=5) as receiver:
        publisher.publish(1)
        polled(receiver).apply()
        del store
        gc.collect()
        with pytest.raises(CheckpointError, match=r"is lost|cannot be reached"):
            publisher.publish(2)
        assert receiver.poll() is None
        assert receiver.version == 1


@pytest.mark.storm
@pytest.mark.parametrize("trainers", [5, 1500])
def test_killed_process_leaves_complete_versions(trainers):
    """Four of five trainers, or their generators, lose a rank at a drawn moment; no generator serves a mixture."""
    seed = trainers if trainers == 5 else int(time.time())
    script = Path(__file__).with_name("kills.py")
    run = subprocess.run(
        [sys.executable, script, str(trainers), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30 * trainers + 120,
    )
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["kills"] > 0
    assert (found["mixtures"], found["hangs"], found["disagreements"]) == (0, 0, 0)
    assert found["healthy versions served"] == found["healthy versions"] == trainers // 5


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.storm) for seed in range(10, 30))])
@pytest.mark.ranks(4, dies=(3,), timeout=90)
def test_killed_generator_does_not_delay_two_others(seed, monkeypatch):
    rng, rank = random.Random(seed), dist.get_rank()
    death = rng.choice(MOMENTS), rng.randrange(1, 4)
    groups = [dist.new_group([each]) for each in range(4)]
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [hosted.port if hosted else None]
    dist.broadcast_object_list(address)
    at, state = Rendezvous(f"127.0.0.1:{address[0]}"), State(model={"a": torch.full((3,), float(rank == 0))})
    store = hosted or dist.TCPStore("127.0.0.1", address[0], is_master=False)
    if rank == 0:
        print("seed", seed, "kills at", death)
        # The timeout is longer than `wait`, so a generator that waited for the dead one would miss its version.
        with Publisher(at, state, group=groups[0], timeout=40) as publisher:
            publisher.publish(1).wait(generators=2, timeout=30)
            deadline = time.monotonic() + 2
            while not store.check(["killed"]) and time.monotonic() < deadline:
                time.sleep(0.01)
            publisher.publish(2).wait(generators=2, timeout=30)
            store.wait(["served 1", "served 2"])
    elif rank < 3:
        with Receiver(at, state, group=groups[rank], timeout=40) as receiver:
            while receiver.version != 2:
                polled(receiver).apply()
            assert state.model["a"].tolist() == [1, 1, 1]
        store.set(f"served {rank}", "")
    else:
        kill = os.kill
        monkeypatch.setattr(os, "kill", lambda *what: store.set("killed", "") or kill(*what))
        die_at(*death)
        with contextlib.suppress(AssertionError), Receiver(at, state, group=groups[3], timeout=40) as receiver:
            while True:
                polled(receiver, 5).apply()
        kill(os.getpid(), signal.SIGKILL)  # the drawn message was not sent
