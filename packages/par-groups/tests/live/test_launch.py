import itertools
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.launcher import LaunchConfig, elastic_launch

from par_groups import ProcessGroups, Topology, launch
from par_groups.live import launch as _launch


@pytest.mark.ranks(2, init=False)
def test_launch_joins_what_torchrun_describes():
    with launch(timeout=300) as environment:
        assert environment.launcher == "torchrun"
        assert environment.rank == dist.get_rank() == int(os.environ["RANK"])
        assert environment.world_size == dist.get_world_size() == 2
        assert environment.is_master == (environment.rank == 0)
        if not torch.accelerator.is_available():
            assert environment.device == torch.device("cpu")
            assert environment.backend == "gloo"
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
    assert not dist.is_initialized()


def dies_once():
    """The sum over the ranks of ones, which rank 0 does not live to return the first time."""
    with launch(device="cpu") as environment:
        value = torch.ones(1)
        dist.all_reduce(value)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9) if environment.rank == 0 else dist.barrier()
        return value.item()


@pytest.mark.ranks(1, init=False)
def test_ranks_that_torchrun_starts_again_meet_again():
    """In the store are the addresses of those that have ended."""
    config = LaunchConfig(  # what `torchrun --standalone --nproc-per-node=2 --max-restarts=1` makes, but for the fork
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="dies_once",
        max_restarts=1,
        start_method="fork",
    )
    assert elastic_launch(config, dies_once)() == {0: 2, 1: 2}


class CountingStore:
    """A store in this process; it counts round trips, and need not have those for many keys at once."""

    def __init__(self, extended=True, seconds=300):
        self.inner, self.timeout, self.trips, self.extended = dist.HashStore(), timedelta(seconds=seconds), 0, extended

    def has_extended_api(self):
        return self.extended

    def __getattr__(self, name):
        def call(*arguments):
            self.trips += 1
            return getattr(self.inner, name)(*arguments)

        return call


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("extended", [True, False])
def test_ranks_meet_in_few_round_trips(extended, stale, monkeypatch):
    """300 ranks, as threads; the store may have words of an earlier start. All get the same new prefix."""
    store, ranks, pauses = CountingStore(extended), 300, []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda span: (pauses.append(span), time.sleep(span)))
    monkeypatch.setattr(_launch, "time", clock)
    if stale:
        for rank in range(1, ranks):
            store.inner.set(f"par_groups/question/{rank}", f"old{rank}")
            store.inner.set(f"par_groups/answer/old{rank}", "old")
            store.inner.set(f"par_groups/received/old/{rank}", "")
    with ThreadPoolExecutor(ranks) as threads:
        others = [threads.submit(_launch._prefix_of_start, store.inner, rank, ranks) for rank in range(1, ranks)]
        mine = _launch._prefix_of_start(store, 0, ranks)
        assert {other.result() for other in others} == {mine} != {"old"}
    if extended:  # in each look, and one that finds that all is there
        assert store.trips <= 4 * len(pauses) + 1


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(_launch, "_TO_HEAR", timedelta(seconds=0.05))
    store = CountingStore(seconds=0.05)
    store.inner.set("par_groups/question/2", "old")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] have not come to the meeting of all ranks within 0.05 s"):
        _launch._prefix_of_start(store, 0, 3)
    with pytest.raises(
        TimeoutError, match=r"rank 1 has not come to the meeting of all ranks within .* look at the logs"
    ):
        _launch._prefix_of_start(store, 0, 2)


def start_without_torchrun(port):
    """As ranks are started by hand: rank 0 keeps the store."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ["MASTER_PORT"] = str(port)
    return int(os.environ["RANK"])


def let_time_pass_when_rank_1_has_come(monkeypatch):
    """For rank 0, whose limit is over by then, however late rank 1 is."""
    prefix_of_start = _launch._prefix_of_start

    def meet(store, *place):
        looks = itertools.count()  # at the first one, when the limit is set, nothing has passed, though rank 1 be there

        def seconds():
            return 100.0 if next(looks) and store.check(["par_groups/question/1"]) else 0.0

        clock = SimpleNamespace(monotonic=seconds, sleep=time.sleep)
        with monkeypatch.context() as patch:
            patch.setattr(_launch, "time", clock)
            return prefix_of_start(store, *place)

    monkeypatch.setattr(_launch, "_prefix_of_start", meet)


@pytest.mark.ranks(3, init=False)
def test_every_rank_that_comes_names_those_that_do_not(free_port, monkeypatch):
    monkeypatch.setattr(_launch, "_TO_HEAR", timedelta(seconds=100))
    if os.environ["RANK"] == "0":
        let_time_pass_when_rank_1_has_come(monkeypatch)
    for by_hand in (False, True):
        if by_hand:
            start_without_torchrun(free_port)
        if os.environ["RANK"] == "2":
            continue
        with pytest.raises(TimeoutError, match="rank 2 has not come to the meeting of all ranks within 50 s; look at"):
            launch(timeout=50 if os.environ["RANK"] == "0" else 200)
        assert not dist.is_initialized()


@pytest.mark.ranks(2, init=False)
def test_a_first_rank_that_does_not_come_is_named(free_port):
    if os.environ["RANK"] == "0":
        return
    with pytest.raises(TimeoutError, match=r"rank 1 has waited 5 s for rank 0 to say that all 2 ranks have come"):
        launch(timeout=5)
    start_without_torchrun(free_port)
    with pytest.raises(TimeoutError, match=rf"rank 1 of 2 has found nobody at 127.0.0.1:{free_port} within 1 s"):
        launch(timeout=1)
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    with pytest.raises(ValueError, match=r"rank 1 cannot find the host 'no-such-host.invalid' .*; set MASTER_ADDR to"):
        launch()


@pytest.mark.ranks(2, init=False)
def test_ranks_that_were_started_by_hand_meet_again_and_again(free_port):
    rank = start_without_torchrun(free_port)
    for _ in range(2):
        with launch("gloo", timeout=300) as environment:
            assert (environment.rank, environment.launcher) == (rank, "torchrun")
            value = torch.ones(1)
            dist.all_reduce(value)
            assert value.item() == 2


@pytest.mark.ranks(2, init=False)
def test_a_rank_that_finds_the_store_of_an_earlier_start_looks_for_its_own(free_port):
    """Rank 1 starts again before rank 0 has ended."""
    if start_without_torchrun(free_port) == 0:
        earlier = dist.TCPStore("127.0.0.1", free_port, 2, is_master=True, wait_for_workers=False)
        earlier.wait(["par_groups/question/1"], timedelta(seconds=300))
        del earlier
    with launch("gloo", timeout=300):
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2


@pytest.mark.ranks(3, init=False)
def test_two_launchers_that_contradict_each_other_are_named_on_every_rank(free_port):
    """A job script has exported what holds on rank 0 alone; srun has started three tasks."""
    rank = start_without_torchrun(free_port)
    tasks = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "3"}
    os.environ.update(tasks, SLURM_STEP_NODELIST="localhost", RANK="0", WORLD_SIZE="3")
    with pytest.raises(ValueError, match=r"^RANK is 0, but srun has started this process as rank 1 of 3: two"):
        launch(timeout=300)
    assert not dist.is_initialized()


@pytest.mark.ranks(1, init=False)
def test_a_port_that_somebody_else_has_is_named(free_port):
    start_without_torchrun(free_port)
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(OSError, match=rf"rank 0 cannot listen at port {free_port}, .*; set MASTER_PORT on every"),
    ):
        launch("gloo", rank=0, world_size=2, timeout=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL has a GPU here")
@pytest.mark.ranks(2, init=False)
def test_nccl_without_a_gpu_is_refused_before_anything_hangs():
    rank = os.environ["RANK"]
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(
            ValueError, match=f"backend is '{backend}', but rank {rank} has no GPU.* pass backend='gloo'"
        ):
            launch(backend)
    with launch():
        with pytest.raises(ValueError, match=f"backend is 'nccl', but rank {rank} has no GPU"):
            ProcessGroups(Topology({"data": 2}), backend="nccl")
        dist.barrier()  # a rank that leaves at once may close the connections that the other one is still making


def test_nccl_for_tensors_on_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for good in ("gloo", "cpu:gloo,cuda:nccl"):
        _launch.check_nccl(good, torch.device("cpu"), 3)
    _launch.check_nccl("nccl", torch.device("cuda", 1), 3)
    with pytest.raises(
        ValueError, match=r"'nccl', which sends tensors on GPUs alone, but the device of rank 3 is 'cpu'"
    ):
        _launch.check_nccl("nccl", torch.device("cpu"), 3)


@pytest.mark.ranks(2)
def test_a_running_world_is_joined_and_left_running():
    with launch() as environment:
        assert environment.launcher == "running"
        assert not environment.started
        assert environment.rank == dist.get_rank()
        assert environment.device == torch.device("cpu")
    assert dist.is_initialized()


@pytest.mark.parametrize(
    ("accelerator", "backend", "expected"),
    [
        (None, "cpu:gloo", "cpu"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda:1"),
        ("cuda", "cuda:nccl", "cuda:1"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("xpu", "cpu:gloo,xpu:xccl", "xpu:1"),
        ("privateuseone", "cpu:gloo,privateuseone:own", "privateuseone:1"),
        ("privateuseone", "cpu:gloo,cuda:nccl", "cpu"),
    ],
)
@pytest.mark.ranks(1)
def test_running_world_of_a_device_backend_takes_it(accelerator, backend, expected, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backend)
    device = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *, check_available: device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(_launch, "_running_device", lambda: torch.device(accelerator, 1))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    assert launch().device == torch.device(expected)


@pytest.mark.ranks(1)
def test_the_device_of_a_running_world_is_the_bound_one_or_the_chosen_one_or_that_of_the_local_rank(monkeypatch):
    monkeypatch.setattr(_launch, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    for current, local_rank, expected in ((0, "3", 3), (2, "3", 2), (0, "4", 0), (0, None, 0), (1, None, 1)):
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda current=current: current)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank is not None:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert _launch._running_device() == torch.device("cuda", expected)


@pytest.mark.ranks(1, init=False)
def test_without_a_launcher_the_process_is_a_world_of_one():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for _ in range(2):
        with launch("gloo", timeout=timedelta(seconds=300)) as environment:
            assert (environment.rank, environment.world_size, environment.launcher) == (0, 1, "single")
            dist.barrier()


@pytest.mark.ranks(2, init=False)
def test_explicit_arguments_need_no_variables():
    rank, port = int(os.environ.pop("RANK")), int(os.environ["MASTER_PORT"])
    os.environ.pop("WORLD_SIZE")
    with launch("gloo", rank=rank, world_size=2, address="127.0.0.1", port=port, timeout=300) as environment:
        assert environment.launcher == "explicit"
        assert dist.get_world_size() == 2
        dist.barrier()  # a rank that leaves at once may close the connections that the other one is still making


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("MASTER_PORT", {}, "the variable MASTER_PORT is missing"),
        (None, {"timeout": -1}, "timeout is -1; it must be positive"),
    ],
)
@pytest.mark.ranks(2, init=False)
def test_every_rank_says_what_is_wrong_before_anything_hangs(missing, arguments, message):
    if missing:
        os.environ.pop(missing)
    with pytest.raises(ValueError, match=message):
        launch(**arguments)
    assert not dist.is_initialized()


@pytest.mark.ranks(1, init=False)
def test_a_rank_without_a_device_is_told_how_many_there_are(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ValueError, match="local rank 3 has no device: this machine has 1 of type cuda"):
        launch(device="cuda")


ENDS = """
import os, sys, warnings
import torch, torch.distributed as dist
from par_groups import launch

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: nothing has started a thread so far
for end in ("environment.close()", "pass"):
    for _ in range(2):
        ranks = []
        for rank in "01":
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.environ.update(RANK=rank, LOCAL_RANK=rank)
                environment = launch()
                group = dist.new_group()
                for _ in range(50):
                    dist.all_reduce(torch.ones(1000), group=group)
                exec(end)
                sys.exit()  # through the end of the interpreter
        endings = [os.waitpid(rank, 0)[1] for rank in ranks]
        if any(endings):
            sys.exit(f"with {end!r} the ranks ended with {endings}")
"""


def test_launch_program_exits_cleanly_after_collectives(free_port):
    """Four worlds: without the wait, most of them abort on a loaded machine. They are forks of one import of torch."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, env=os.environ | world, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
