"""Generators that have an earlier version receive the values that changed since."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import Publisher, Receiver, State
from par_checkpoint.live import source as moving
from par_checkpoint.live.delta import encoded_bytes
from par_checkpoint.transfer.ranks import Ranks
from par_testing import for_each

from .cuts import sharded
from .test_publish import polled, rendezvous

__all__ = ["rendezvous"]

COUNT = 10_007
CHANGED = {"nothing": 0, "1 %": 100, "3 %": 300, "half": 5000, "all": COUNT}


def attempts(store, publisher):
    """The number of updates that generators have requested from a publisher."""
    return store.add(f"par_checkpoint/weights/{publisher._number}/updates", 0)


def changed_(tensor, count, seed=0):
    """Change some elements in their bf16 values."""
    chosen = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(seed))[:count]
    tensor.view(-1)[chosen] += 1000.0


@for_each(dtype=[torch.bfloat16, torch.float32], served=[torch.bfloat16, torch.float32])
def test_update_receives_the_bytes_of_the_formula(rendezvous, dtype, served):
    at, _ = rendezvous
    trained = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    other = torch.zeros(COUNT, dtype=served)
    width = min(dtype.itemsize, served.itemsize)
    with (
        Publisher(at, State(model={"a": trained}), dtype=dtype, timeout=20) as publisher,
        Receiver(at, State(model={"a": other}), timeout=20) as receiver,
    ):
        for version, count in enumerate((COUNT, *CHANGED.values())):
            changed_(trained, count, version)
            publisher.publish(version)
            staged = polled(receiver)
            expected = min(COUNT * width, -(-COUNT // 8) + count * width, count * (4 + width))
            assert staged.received == expected == encoded_bytes(COUNT, width, count)
            staged.apply()
            assert torch.equal(other.float(), trained.to(dtype).to(served).float())


def test_update_skips_changes_that_vanish_in_the_cast(rendezvous):
    at, _ = rendezvous
    trained, other = torch.ones(64), torch.zeros(64, dtype=torch.bfloat16)
    with (
        Publisher(at, State(model={"a": trained}), timeout=20) as publisher,
        Receiver(at, State(model={"a": other}), timeout=20) as receiver,
    ):
        publisher.publish(1)
        polled(receiver).apply()
        trained += 1e-4  # one eighth of the distance to the next bf16
        publisher.publish(2)
        assert polled(receiver).received == 0


def test_update_moves_nan_payloads_and_signs_of_zero(rendezvous):
    at, _ = rendezvous
    codes = torch.tensor([0x7FC0, 0x7FC1, 0x7F81, 0, 0x3F80, 0], dtype=torch.int16)
    trained, other = codes.clone().view(torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    with (
        Publisher(at, State(model={"a": trained}), dtype=None, timeout=20) as publisher,
        Receiver(at, State(model={"a": other}), timeout=20) as receiver,
    ):
        publisher.publish(1)
        polled(receiver).apply()
        assert torch.equal(other.view(torch.int16), codes)
        trained.view(torch.int16)[0], trained.view(torch.int16)[3] = 0x7FC2, -0x8000
        publisher.publish(2)
        staged = polled(receiver)
        assert staged.received == 1 + 2 * 2  # a bitmap and two elements
        staged.apply()
        assert other.view(torch.int16).tolist() == [0x7FC2, 0x7FC1, 0x7F81, -0x8000, 0x3F80, 0]


@pytest.mark.ranks(4, timeout=120)
def test_update_between_cuts_receives_changed_values_only():
    rank, shape = dist.get_rank(), (30, 14)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    address = [f"127.0.0.1:{hosted.port}" if hosted else None]
    dist.broadcast_object_list(address)
    at = moving_rendezvous(address[0])
    full = torch.arange(420.0).view(shape) % 100
    if rank < 2:
        state, box = part(shape, 0, rank)
        with Publisher(at, state, group=groups[0], timeout=30) as publisher:
            for version in (1, 2):
                box.of(state.model["a"]).copy_(full[box.slices])
                publisher.publish(version).wait(timeout=30)
                full[::10, 3] += 1
                dist.barrier()
    else:
        state, box = part(shape, 1, rank - 2)
        with Receiver(at, state, group=groups[1], timeout=30) as receiver:
            for version in (1, 2):
                staged = polled(receiver)
                staged.apply()
                # Each of two trainers has 15 of 30 rows; three rows changed, two of them on the first one.
                first = sum(encoded_bytes(15 * 7, 2, count) for count in (2, 1)) if rank == 2 else 0
                assert staged.received == (30 * 7 * 2 if version == 1 else first)
                assert torch.equal(box.of(state.model["a"]), full[box.slices])
                full[::10, 3] += 1
                dist.barrier()


def moving_rendezvous(address):
    """The rendezvous at an address."""
    from par_checkpoint import Rendezvous

    return Rendezvous(address)


def part(shape, dim, rank):
    """The state of one of two ranks that shard a dim, and its box."""
    start, size = [0, 0], list(shape)
    start[dim], size[dim] = rank * shape[dim] // 2, shape[dim] // 2
    model, layout = sharded(shape, [(tuple(start), tuple(size))], rank, torch.float32)
    return State(model={"a": model}, layout={"a": layout}), layout.boxes[0]


@for_each(case=["keep=0", "skipped", "restarted trainer", "another generator"])
def test_generator_with_another_base_receives_all_values(rendezvous, case):
    at, _ = rendezvous
    trained, other = torch.arange(64.0), torch.zeros(64)
    state, mine = State(model={"a": trained}), State(model={"a": other})
    with Receiver(at, mine, timeout=20) as receiver:
        with Publisher(at, state, keep=0 if case == "keep=0" else 1, timeout=20) as publisher:
            publisher.publish(1)
            polled(receiver).apply()
            if case == "skipped":  # another generator takes version 2, which becomes the base that is kept
                receiver.close()
                publisher.publish(2)
                with Receiver(at, State(model={"a": torch.zeros(64)}), timeout=20) as second:
                    polled(second).apply()
            if case == "keep=0":
                publisher.publish(2)
                assert polled(receiver).received == 128
            elif case == "another generator":
                with Receiver(at, State(model={"a": torch.zeros(64)}), timeout=20) as second:
                    assert polled(second).received == 128
        if case == "restarted trainer":
            with Publisher(at, state, timeout=20) as publisher:
                publisher.publish(2)
                assert polled(receiver).received == 128


def test_publisher_that_keeps_two_versions_serves_both_bases(rendezvous):
    at, _ = rendezvous
    trained = torch.arange(64.0)
    with Publisher(at, State(model={"a": trained}), keep=2, timeout=20) as publisher:
        publisher.publish(1)
        with (
            Receiver(at, State(model={"a": torch.zeros(64)}), timeout=20) as slow,
            Receiver(at, State(model={"a": torch.zeros(64)}), timeout=20) as quick,
        ):
            staged = polled(slow)
            for version in (1, 2):
                polled(quick).apply()
                if version == 1:
                    trained[3] = 7
                    publisher.publish(2)
            trained[5] = 9
            publisher.publish(3)
            assert polled(quick).received == 6
            staged.apply()
            assert polled(slow).received == 12


def test_publisher_with_a_negative_keep_raises(rendezvous):
    for keep in (-1, "x"):
        with pytest.raises(ValueError, match=f"keep={keep!r}: not a number of versions; pass 0 or more"):
            Publisher(rendezvous[0], State(model={"a": torch.ones(3)}), keep=keep)


def spoil(case, receiver, monkeypatch):
    """Arrange a fault in the next update, once."""
    left = [1]
    if case == "stale base":
        receiver._memory.tensors["a"][5] += 1
    elif case == "flipped bit":
        real = Ranks.send

        def send(self, buffer, to):
            if buffer.numel() in (6, 12, 128) and left:
                left.clear()
                buffer = buffer.clone()
                buffer[-1] ^= 1
            return real(self, buffer, to)

        monkeypatch.setattr(Ranks, "send", send)
    else:
        real_view = moving.LocalState.view

        def view(self, piece):
            found = real_view(self, piece)
            if left and piece.changed is not None:
                left.clear()
                return found.flip(0)
            return found

        monkeypatch.setattr(moving.LocalState, "view", view)


@for_each(case=["stale base", "flipped bit", "swapped elements"])
def test_update_with_a_fault_aborts_and_is_repeated(rendezvous, case, monkeypatch):
    at, store = rendezvous
    trained, other = torch.arange(64.0), torch.zeros(64)
    with (
        Publisher(at, State(model={"a": trained}), timeout=20) as publisher,
        Receiver(at, State(model={"a": other}), timeout=20) as receiver,
    ):
        publisher.publish(1)
        polled(receiver).apply()
        trained[3] = 77
        before = attempts(store, publisher)
        spoil(case, receiver, monkeypatch)
        publisher.publish(2)
        staged = polled(receiver)
        assert attempts(store, publisher) == before + 2  # the first one was aborted
        assert staged.received == 128  # a base that may be spoiled is not used again
        assert other[3] == 3
        staged.apply()
        assert torch.equal(other, trained)


def test_finished_updates_leave_no_keys(rendezvous):
    at, store = rendezvous
    trained, other = torch.arange(64.0), torch.zeros(64)
    with (
        Publisher(at, State(model={"a": trained}), timeout=20) as publisher,
        Receiver(at, State(model={"a": other}), timeout=20) as receiver,
    ):
        for version in range(12):
            publisher.publish(version)
            polled(receiver).apply()
    keys = {key.removeprefix("par_checkpoint/weights/") for key in store.list_keys() if "weights" in key}
    assert keys == {"publishers", "newest", "1/ranks", "1/updates", "1/closed"}


SCRIPT = """
import time, torch
import torch.distributed as dist
from par_checkpoint import Publisher, Receiver, Rendezvous, State
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
at = Rendezvous(f"127.0.0.1:{store.port}")
publisher = Publisher(at, State(model={"a": torch.ones(3)}), timeout=20)
receiver = Receiver(at, State(model={"a": torch.zeros(3)}), timeout=20)
publisher.publish(1)
while (staged := receiver.poll()) is None:
    time.sleep(0.01)
staged.apply()
"""


@pytest.mark.storm
def test_process_that_publishes_ends_without_an_abort():
    # A thread in gloo or in the store's client at the end of the interpreter would abort the process.
    ends = ("", "publisher.close()\nreceiver.close()")
    runs = [subprocess.Popen([sys.executable, "-c", SCRIPT + end], stderr=subprocess.PIPE, text=True) for end in ends]
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
