import asyncio
import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from par_groups import _torch_private
from par_groups.elastic.waits import let_waits_end


@pytest.mark.ranks(2, backend="gloo")  # which knows the timeout of a group
def test_what_is_used_of_a_running_world_is_there():
    assert _torch_private.can_split(dist.group.WORLD, torch.device("cpu")) in {True, False}  # newer gloos can
    before = _torch_private.number_of_groups()
    group = dist.new_group([0, 1])
    assert _torch_private.number_of_groups() == before + 1
    dist.destroy_process_group(group)
    assert _torch_private.number_of_groups() == before
    assert _torch_private.timeout_of(dist.new_group([0, 1], timedelta(seconds=7)), torch.device("cpu")).seconds == 7
    assert _torch_private.default_store().add("par_groups/test", 2) in {2, 4}
    with _torch_private.group_called("mine"):
        called = dist.new_group([0, 1], use_local_synchronization=True)
    assert called.group_name == "mine"


def test_reset_of_names_repairs_a_start_that_failed():
    def start(ranks):
        store, span = dist.HashStore(), timedelta(seconds=0.2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=ranks, timeout=span)

    with pytest.raises(RuntimeError):
        start(2)  # the other rank never comes
    _torch_private.reset_group_names()
    start(1)
    try:
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


def test_a_strided_shard_has_a_factor_and_others_have_none():
    assert _torch_private.split_factor(_StridedShard(0, split_factor=3)) == 3
    assert _torch_private.split_factor(Shard(0)) is None
    assert _torch_private.split_factor(Replicate()) is None


@pytest.mark.ranks(2, backend="gloo")
def test_torch_notes_its_collectives_and_counts_those_of_a_group():
    before = _torch_private.operations_begun(dist.group.WORLD)
    dist.barrier()
    assert _torch_private.operations_begun(dist.group.WORLD) == before + 1
    entry = _torch_private.flight_trace()["entries"][-1]
    used = "process_group collective_seq_id p2p_seq_id is_p2p profiling_name input_sizes input_dtypes retired state"
    assert set(f"{used} time_created_ns frames".split()) <= set(entry)
    assert {"filename", "line"} <= set(entry["frames"][0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler warns of torch
@pytest.mark.ranks(1)  # whose process has the compiler imported
def test_a_compiled_module_is_seen_either_way():
    method = nn.Linear(2, 2)
    assert not _torch_private.is_compiled(method)
    method.compile(backend="eager")
    assert _torch_private.is_compiled(method)
    assert _torch_private.is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))


@pytest.mark.ranks(3, backend="gloo")
def test_shut_down_sockets_of_gloo_end_a_collective_of_all_ranks(monkeypatch):
    # A new release of torch or gloo that connects in another way fails here: see `gloo_sockets`.
    before = len(_torch_private.gloo_sockets())
    group = dist.new_group([0, 1, 2])
    assert before == 2
    assert len(_torch_private.gloo_sockets()) == 4  # each group has a connection with each peer
    dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()
    left = threading.Event()
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)
    let_waits_end(lambda: None if left.is_set() else 0)  # gloo forgets a message that is under way
    threading.Timer(2, left.set).start()
    begin = time.monotonic()
    if dist.get_rank() == 0:
        _torch_private.shut_down_sockets(_torch_private.gloo_sockets())
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(4), group=group)
    # A rank that has an error leaves as well, so that no rank waits for another one that has left.
    _torch_private.shut_down_sockets(_torch_private.gloo_sockets())
    while _torch_private.gloo_sockets():  # gloo closes each of them
        assert time.monotonic() - begin < 20  # far below the timeout of the group
        time.sleep(0.01)


@pytest.mark.ranks(3, backend="gloo")
def test_socket_that_gloo_closes_meanwhile_hides_no_other(monkeypatch):
    first, *others = _torch_private.gloo_sockets()
    look_at = os.fstat

    def closed(descriptor):
        if descriptor == first:
            raise OSError(errno.EBADF, "as after the death of a peer")
        return look_at(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", closed)
        assert list(_torch_private.gloo_sockets()) == others


@pytest.mark.ranks(2, backend="gloo")
def test_wait_for_a_peer_that_never_connects_ends():
    # One rank of a pair listens, and the other one connects, so each of them waits in turn.
    for waiting in (0, 1):
        others = _torch_private.gloo_sockets()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=60)
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        store = dist.PrefixStore(f"pair {waiting}", _torch_private.default_store())
        gloo = dist.ProcessGroupGloo(store, dist.get_rank(), 2, options)
        dist.barrier()
        if dist.get_rank() == waiting:
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(lambda gloo=gloo, peer=1 - waiting: gloo.recv([torch.ones(1)], peer, 0).wait())
                time.sleep(0.1)
                begin = time.monotonic()
                own = _torch_private.gloo_sockets().items() - others.items()
                _torch_private.shut_down_sockets(dict(own))
                _torch_private.end_gloo_connects(2)
                with pytest.raises(RuntimeError, match=r"Connection closed by peer|reset by peer"):
                    received.result(10)
                assert time.monotonic() - begin < 5
        # Groups that are connected do not notice it.
        dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
def test_sockets_of_other_libraries_are_none_of_gloo():
    own = _torch_private.gloo_sockets()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)

    async def serve():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert _torch_private.gloo_sockets() == own
        writer.close()
        server.close()

    asyncio.run(serve())
    assert set(own) < set(_torch_private.tcp_sockets())
    client.set("a", "b")
    assert client.get("a") == b"b"


def test_descriptor_with_another_inode_is_not_shut_down():
    one, other = socket.socketpair()
    with one, other:
        inode = os.fstat(one.fileno()).st_ino
        _torch_private.shut_down_sockets({one.fileno(): inode + 1})
        one.send(b"a")
        assert other.recv(1) == b"a"
        _torch_private.shut_down_sockets({one.fileno(): inode})
        assert other.recv(1) == b""


def test_hooks_of_an_optimizer_are_found_and_left_out():
    optimizer, called = torch.optim.SGD(nn.Linear(2, 2).parameters()), []
    optimizer.register_step_post_hook(called.append)
    assert [[*each.values()] for each in _torch_private.hooks_of(optimizer).values() if each] == [[called.append]]
    _torch_private.bare_step(optimizer)(optimizer)
    assert not called
