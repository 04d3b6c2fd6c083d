"""The end of a strategy: nothing of it stays, so that one may live after the other in a process."""

import gc
import multiprocessing
import time
import weakref
from functools import partial
from operator import ge
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_groups import ProcessGroups, Topology, launch
from par_testing import for_each, live_bytes, storm
from par_train import Strategy

OPTIONS = {
    "a pipeline": {"parallel": {"pipeline": 2}, "pipeline": {"microbatches": 2}},
    "shared optimizer state in bf16": {"zero": 1, "precision": "bf16", "clip_norm": 1.0},
    "shared parameters": {"zero": 3},
}
"""What two ranks are used for."""

WORKERS = {"num_workers": 1, "multiprocessing_context": "fork"}
"""Of a data loader: forked, as they are without a test's forkserver, where each worker would import torch."""
forks_with_threads = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def make_loader(**keywords):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 15, generator=generator), torch.randn(24, 7, generator=generator))
    return DataLoader(data, batch_size=4, **keywords)


def train(strategy, steps=2, **keywords):
    """Some steps; `keywords` are those of the data loader."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(15, 17), nn.GELU(), nn.Linear(17, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = strategy.initialize(model, optimizer, make_loader(**keywords))
    losses = []
    for _ in range(steps):
        losses.append(strategy.execute_pipeline(loader, model, functional.mse_loss, optimizer).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, (model, optimizer, loader)


def counted():
    """What this process has now: communicators that torch knows, threads, sockets, and processes of its own."""
    gc.collect()
    files = (each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return {
        "communicators": len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 0,
        "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
        "sockets": sum(str(each).startswith("socket:") for each in files),
        "processes": len(multiprocessing.active_children()),
    }


def settled():
    """What is counted when nothing has come or gone for half a second: threads and connections end a moment later."""
    found, since = counted(), time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.02)
        if (now := counted()) != found:
            found, since = now, time.monotonic()
    return found


def more_than(most):
    """What is counted beyond the most that is expected, once a minute is over: threads and connections end later."""
    deadline = time.monotonic() + 60
    while (more := {name: found for name, found in counted().items() if found > most[name]}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return more


@forks_with_threads
@for_each(name=("a pipeline", storm("shared optimizer state in bf16"), "shared parameters"))
@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_strategies_one_after_the_other_leave_nothing(name):
    losses, alone, first, first_bytes = [], counted(), {}, 0
    for persistent in (False, True):
        with Strategy(**OPTIONS[name]) as strategy:
            found, _ = train(strategy, **WORKERS, persistent_workers=persistent)
            losses.append(found)
        del strategy, _
        if len(losses) == 1:  # torch's own threads, such as autograd's, have begun
            first, first_bytes = settled(), live_bytes()
            assert (first["communicators"], first["processes"]) == (alone["communicators"], 0)
        else:
            assert not more_than(first)
            assert live_bytes(partial(ge, first_bytes)) <= first_bytes
        dist.barrier()
    assert losses[0] == losses[1]


@pytest.mark.ranks(2, init=False)
def test_a_strategy_that_has_started_torch_distributed_ends_it():
    for name in ("a pipeline", "shared parameters"):
        with Strategy(**OPTIONS[name]) as strategy:
            train(strategy)
        assert not dist.is_initialized()


@forks_with_threads
@for_each(name=OPTIONS)
@pytest.mark.ranks(2)
def test_a_closed_strategy_lets_go_of_all_and_says_so(name, tmp_path):
    strategy = Strategy(**OPTIONS[name])
    _, (model, optimizer, loader) = train(strategy, **WORKERS)
    for _ in range(2):
        strategy.close()
    assert not multiprocessing.active_children()
    for call, arguments in {
        "initialize": (nn.Linear(1, 1),),
        "backward": (torch.zeros(()), optimizer),
        "execute_pipeline": (loader, model, functional.mse_loss, optimizer),
        "pipeline": (model,),
        "save": (model, tmp_path),
        "load": (model, tmp_path),
        "resume": (tmp_path,),
        "checkpoints": (tmp_path,),
    }.items():
        with pytest.raises(RuntimeError, match=r"the strategy is closed; make a new Strategy\(\.\.\.\)"):
            getattr(strategy, call)(*arguments)
    with pytest.raises(RuntimeError, match="the strategy is closed"):
        strategy.checkpoint(tmp_path, step=1)
    assert (len(loader), loader.samples) == (6, 8)
    with pytest.raises(RuntimeError, match="this ShardedDataLoader is closed; create another one"):
        next(iter(loader))
    reference = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert reference() is None  # though model, optimizer and loader live on
    assert isinstance(optimizer, torch.optim.Optimizer)


@pytest.mark.ranks(2)
def test_groups_that_were_given_run_on():
    with ProcessGroups(Topology.from_config({}, 2)) as groups:
        for _ in range(2):
            with Strategy(parallel=groups, zero=3) as strategy:
                train(strategy)
            value = torch.ones(1)
            dist.all_reduce(value, group=groups["data"])
            assert value.item() == 2


@pytest.mark.storm
@pytest.mark.ranks(4, init=False)
def test_a_pipeline_that_fails_is_named_on_its_ranks_and_keeps_replicas_no_longer_than_a_collective_may_take(tmp_path):
    with launch(timeout=12) as environment:
        strategy = Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2}, zero=1)
        model = nn.Sequential(nn.Linear(15, 17), nn.GELU(), nn.Linear(17, 7))
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = next(iter(make_loader()))
        batches = iter([batch] * (1 if environment.rank == 1 else 2))

        def step():
            strategy.execute_pipeline(batches, model, functional.mse_loss, optimizer)
            optimizer.step()

        step()
        of_this_pipeline = strategy.groups.rank("data") == 0
        words = r"the data of ranks \[1\] of the pipeline has ended, that of ranks \[0\] has not"
        if not of_this_pipeline:
            words = r"waits for rank [01], which is at|[Tt]imed out|[Tt]imeout"
        with pytest.raises(RuntimeError, match=words):
            step()
        if of_this_pipeline:  # it lives on until the others have failed, who cannot know by its end
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.02)
        else:
            (tmp_path / str(environment.rank)).touch()
        strategy.close()


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_by_an_error_waits_for_nobody():
    strategy = Strategy(**OPTIONS["a pipeline"])
    train(strategy)
    if dist.get_rank() == 1:
        start = time.monotonic()
        strategy.__exit__(KeyError, KeyError("mine alone"), None)
        assert time.monotonic() - start < 100  # seconds; long before the limit of a collective
    dist.barrier()
    strategy.close()
