"""A save whose copy is made in the background: what waits for it, what it refuses, what it leaves alone."""

import copy
import sys
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from par_checkpoint import CheckpointError, Transfer, load, save, verify
from par_checkpoint.transfer import snapshot as copying
from par_checkpoint.transfer.chunks import Chunks
from par_checkpoint.transfer.snapshot import Snapshot
from par_testing import default_device_type, for_each

from .helpers import RUNS, policies, solo

BACKGROUND = {"async_": True, "transfer": Transfer(copy="background")}


class Gate:
    """Holds every copy in the background until it is opened."""

    def __init__(self):
        self.opened = threading.Event()
        self._finish = Snapshot.finish

    def open(self):
        self.opened.set()

    def open_soon(self):
        """Once the calling thread has waited for something for a while, or a minute is over."""
        caller, end = threading.get_ident(), time.monotonic() + 60

        def look():
            while not self.opened.is_set() and time.monotonic() < end:
                if sys._current_frames()[caller].f_code.co_filename == threading.__file__:
                    break
                time.sleep(0.01)
            time.sleep(0.1)
            self.open()

        threading.Thread(target=look, daemon=True).start()

    def __enter__(self):
        def finish(snapshot):
            assert self.opened.wait(240)
            self._finish(snapshot)

        self._patch = mock.patch.object(Snapshot, "finish", finish)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self.open()
        self._patch.stop()


@pytest.fixture
def gate():
    with Gate() as gate:
        yield gate


class Net(nn.Module):
    """Parameters, a frozen one among them, and buffers that a forward pass changes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(15, 17)
        self.norm = nn.BatchNorm1d(17)
        self.frozen = nn.Parameter(torch.randn(123), requires_grad=False)

    def forward(self, inputs):
        self.frozen.data.add_(1)  # past every count of changes
        return self.norm(self.inner(inputs)).square().mean()


def backward(model, step):
    model(torch.randn(8, 15, generator=torch.Generator().manual_seed(step))).backward()


def step_(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """All tensors of a training, copied."""
    tensors = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{slot}": torch.as_tensor(value) for slot, value in state.items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_holds(path, expected, make=torch.optim.AdamW, group=None):
    """That a checkpoint holds those tensors."""
    model = Net(seed=9)
    optimizer = make(model.parameters())
    load(path, model=model, optimizer=optimizer, group=group)
    found = everything(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, whose step is not its."""

    def __init__(self, inner):
        self.inner = inner
        self.__setstate__({"defaults": inner.defaults, "state": inner.state, "param_groups": inner.param_groups})

    def step(self):
        self.inner.step()


def optimizers(model):
    """Makes of optimizers."""
    for options in ({}, {"fused": True}, {"foreach": True}, {"foreach": False}):
        yield torch.optim.AdamW(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize("given", ["itself", "wrapper", "inner"])
@pytest.mark.parametrize("number", range(4))
def test_a_step_waits_for_the_copy_and_what_is_saved_is_of_the_call(gate, tmp_path, number, given):
    """A fused optimizer counts no changes: without the hook nothing would tell."""
    model = Net()
    inner = list(optimizers(model))[number]
    optimizer = inner if given == "itself" else Wrapper(inner)
    step_(model, optimizer, range(2))
    expected = everything(model, inner)
    handle = save(tmp_path / "c", model=model, optimizer=inner if given == "inner" else optimizer, **BACKGROUND)
    in_call = handle.blocked_seconds
    backward(model, 2)
    assert not handle.done()
    gate.open_soon()
    optimizer.step()
    assert handle.blocked_seconds - in_call > 0.01
    handle.wait()
    assert not torch.equal(model.inner.weight, expected["inner.weight"])
    assert_holds(tmp_path / "c", expected)
    assert verify(tmp_path / "c") == []


def test_an_optimizer_that_is_not_saved_waits_too(gate, tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.inner.weight.clone()
    handle = save(tmp_path / "c", model=model, **BACKGROUND)
    backward(model, 0)
    gate.open_soon()
    optimizer.step()
    handle.wait()
    model = Net(seed=9)
    load(tmp_path / "c", model=model)
    assert torch.equal(model.inner.weight, expected)


def test_a_copy_of_an_optimizer_waits_and_has_no_hook_of_its_own(gate, tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step_(model, optimizer, range(1))
    handle = save(tmp_path / "c", model=model, optimizer=optimizer, **BACKGROUND)
    twin_model, twin = copy.deepcopy((model, optimizer))
    gate.open_soon()
    step_(twin_model, twin, range(1))
    handle.wait()
    assert not twin._optimizer_step_pre_hooks


def test_training_is_the_same_to_the_bit(tmp_path):
    results = []
    for options in (None, {"copy": "blocking"}, {"copy": "background"}):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        expected = []
        for step in range(4):
            step_(model, optimizer, range(step, step + 1))
            expected.append(everything(model, optimizer))
            if options is not None:
                save(
                    tmp_path / f"{step}",
                    model=model,
                    optimizer=optimizer,
                    overwrite=True,
                    async_=True,
                    **policies(**options),
                )
        results.append(expected[-1])
        for step in range(4) if options else ():
            assert_holds(tmp_path / f"{step}", expected[step])
    for other in results[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in results[0].items())


def test_the_caller_may_wait_and_again_costs_nothing(gate, tmp_path):
    weight = nn.Parameter(torch.ones(123))
    handle = save(tmp_path / "c", model={"w": weight}, **BACKGROUND)
    gate.open_soon()
    handle.wait_for_copy()
    blocked = handle.blocked_seconds
    weight.data.zero_()
    handle.wait_for_copy()
    assert handle.blocked_seconds == blocked > 0.01
    handle.wait()
    other = torch.empty(123)
    load(tmp_path / "c", model={"w": other})
    assert other.sum() == 123


def test_there_is_nothing_to_wait_for_after_other_saves(tmp_path):
    for options in ({}, {"async_": True}, {"copy": "background"}, {"style": "torch", "async_": True}):
        handle = save(tmp_path / "c", model={"w": torch.ones(3)}, overwrite=True, **policies(**options))
        blocked, hooks = handle.blocked_seconds, len(_global_optimizer_pre_hooks)
        handle.wait_for_copy()
        assert (handle.blocked_seconds, len(_global_optimizer_pre_hooks)) == (blocked, hooks)
        handle.wait()


def test_hooks_go_with_the_save(tmp_path):
    model, before = {"w": nn.Parameter(torch.ones(3))}, len(_global_optimizer_pre_hooks)
    optimizer = torch.optim.SGD(model.values(), lr=0.1)
    for number in range(5):  # without a step, with one, with several
        handle = save(tmp_path / f"{number}", model=model, **BACKGROUND)
        assert len(_global_optimizer_pre_hooks) == before + 1
        for _ in range(number % 3):
            optimizer.step()
    handle.wait()
    assert len(_global_optimizer_pre_hooks) == before
    handle = save(tmp_path / "last", model=model, **BACKGROUND)
    handle.wait_for_copy()
    assert len(_global_optimizer_pre_hooks) == before
    handle.wait()


def surgery(model, optimizer):
    """Ways of changing what is being copied, and the name of what changes first."""
    state = optimizer.state[model.inner.bias]
    yield "inner.weight", lambda: model.load_state_dict(copy.deepcopy(model.state_dict()))
    yield "inner.weight", lambda: nn.init.zeros_(model.inner.weight)
    yield "norm.bias", lambda: torch._foreach_lerp_([model.norm.bias.detach()], [torch.ones(17)], 0.5)
    yield "inner.bias.exp_avg", state["exp_avg"][3:].zero_
    yield "inner.bias.step", lambda: state["step"].add_(1)


@pytest.mark.parametrize("number", range(5))
def test_what_is_changed_before_it_is_copied_is_refused(gate, tmp_path, number):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step_(model, optimizer, range(1))
    before = everything(model, optimizer)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    step_(model, optimizer, range(1, 2))
    name, change = list(surgery(model, optimizer))[number]
    handle = save(tmp_path / "c", model=model, optimizer=optimizer, overwrite=True, **BACKGROUND)
    change()
    gate.open()
    with pytest.raises(CheckpointError, match=rf"'{name}' was changed while .*wait_for_copy\(\).*copy='blocking'"):
        handle.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert_holds(tmp_path / "c", before)
    save(tmp_path / "c", model=model, optimizer=optimizer, overwrite=True, **BACKGROUND).wait()
    assert_holds(tmp_path / "c", everything(model, optimizer))


def test_other_tensors_are_copied_before_the_call_returns(gate, tmp_path):
    """Plain tensors change when they like; some lie in one block with parameters."""
    model = {name: torch.full((123,), 1.0) for name in "ace"} | {name: nn.Parameter(torch.ones(17)) for name in "bd"}
    handle = save(tmp_path / "c", model=model, **BACKGROUND)
    for name in "ace":
        model[name].fill_(7.0)
    gate.open()
    handle.wait()
    found = {name: torch.empty(tensor.shape) for name, tensor in model.items()}
    load(tmp_path / "c", model=found)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in found.values())


def test_memory_that_was_replaced_is_saved_as_it_was(gate, tmp_path):
    weight = nn.Parameter(torch.ones(123))
    handle = save(tmp_path / "c", model={"w": weight}, **BACKGROUND)
    weight.data = torch.zeros(123)
    gate.open()
    handle.wait()
    load(tmp_path / "c", model={"w": weight})
    assert weight.sum() == 123


def test_what_counts_no_changes_is_copied_at_once(gate, tmp_path):
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(123))
    handle = save(tmp_path / "c", model={"w": weight}, **BACKGROUND)
    with torch.inference_mode():
        weight.zero_()
    gate.open()
    handle.wait()
    other = torch.empty(123)
    load(tmp_path / "c", model={"w": other})
    assert other.sum() == 123


def test_a_second_save_waits_or_raises_while_the_first_copies(gate, tmp_path):
    model = {"w": nn.Parameter(torch.ones(3))}
    first = save(tmp_path / "a", model=model, **BACKGROUND)
    with pytest.raises(CheckpointError, match="an earlier save is still being written and pending is 'raise'"):
        save(tmp_path / "b", model=model, async_=True, transfer=Transfer(copy="background", pending="raise"))
    gate.open_soon()
    second = save(tmp_path / "b", model=model, **BACKGROUND)
    assert first.done()
    second.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("owner", "name"), [(copying, "join_"), (Chunks, "split")])
def test_an_error_of_the_copy_keeps_nobody_waiting(gate, tmp_path, monkeypatch, owner, name):
    def fail(*_):
        raise MemoryError("no more")

    model = {"w": nn.Parameter(torch.ones(3 << 20))}
    optimizer = torch.optim.SGD(model.values(), lr=0.1)
    handle = save(tmp_path / "c", model=model, **BACKGROUND)
    monkeypatch.setattr(owner, name, fail)
    gate.open_soon()
    optimizer.step()
    with pytest.raises(CheckpointError, match="no more"):
        handle.wait()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save(tmp_path / "c", model=model, **BACKGROUND).wait()
    assert verify(tmp_path / "c") == []


def test_an_unknown_copy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="copy is 'later'; it can be 'blocking', 'background'"):
        save(tmp_path / "c", model={}, transfer=Transfer(copy="later"))


@for_each(copied=("blocking", "background"))
@pytest.mark.ranks(4)
def test_shards_are_saved_as_they_are_at_the_call(tmp_path, copied):
    tmp_path = tmp_path / copied
    for kind in ("tensor", "zero1", "strided") if copied == "background" else ("zero1",):
        run = RUNS[kind]()
        run.steps(range(1))
        expected = run.whole()
        handles = []
        for number in range(2):
            path = tmp_path / f"{kind}{run.ranks[0]}" / f"{number}"
            with Gate() as gate:
                options = {
                    "model": run.model,
                    "optimizer": run.optimizer,
                    "group": run.group,
                    "transfer": Transfer(copy=copied),
                }
                handles.append(save(path, **options, async_=True))
                gate.open_soon()
                if number == 0:
                    run.steps(range(1, 3))  # beside the save: its collectives and the trainer's do not meet
        for handle in handles:
            handle.wait()
        one = RUNS["one"](seed=3)
        load(tmp_path / f"{kind}{run.ranks[0]}" / "0", model=one.model, optimizer=one.optimizer, group=solo())
        assert all(torch.equal(value, expected[name]) for name, value in one.whole().items()), kind
        dist.barrier()


@pytest.mark.cpu(reason="changes a tensor under copy, which is a race on a device")
@pytest.mark.ranks(2)
def test_what_one_rank_changes_is_everyones_error(tmp_path):
    mesh = init_device_mesh(default_device_type(), (2,))
    cut = {name: nn.Parameter(distribute_tensor(torch.ones(15, 17), mesh, [Shard(0)])) for name in "ab"}
    replicas = {name: nn.Parameter(torch.ones(15, 17)) for name in "ab"}
    for number, model in enumerate((cut, replicas)):
        with Gate() as gate:
            handle = save(tmp_path / f"{number}", model=model, **BACKGROUND)
            if dist.get_rank() == 1:
                model["b"].detach().zero_()
            gate.open()
            with pytest.raises(CheckpointError, match="'b' was changed while the save copied it"):
                handle.wait()
        dist.barrier()
        assert list(tmp_path.iterdir()) == []
        dist.barrier()
    save(tmp_path / "c", model=cut, **BACKGROUND).wait()
    assert verify(tmp_path / "c") == []
