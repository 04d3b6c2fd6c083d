"""Programs that fail, fork, copy, pickle or clear state in the middle of offloaded steps."""

import copy
import gc
import io
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from par_groups import settle_, slots_of
from par_testing import for_each
from par_zero import shard

from ..helpers import assert_same, batch, loss_of, mlp, policies, whole
from .cases import moments, on_disk, small

pytestmark = pytest.mark.cpu(reason="offload from a CPU: that from a device has tests of its own")

STREAMED = {"at once": (1, False), "late": (3, True)}


def steps(make, offload, stage, step=None, *, count=4, rows=None):
    """Parameters and state after some steps, of which `step(number, optimizer, module)` makes each."""
    module = mlp()
    optimizer = make(module.parameters())
    own = type(optimizer) in {Stumbling, Ignoring}
    options = {"bucket": 300, "offload": offload, "elementwise": own}
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(**options))
    for number in range(count):
        loss_of(module, batch(number, width=8)).backward()
        if step is None:
            optimizer.step()
        else:
            step(number, optimizer, module)
        optimizer.zero_grad()
    settle_(optimizer.param_groups[0]["params"])
    return whole(module) | moments(optimizer)


def compare(make, path, how, step=None):
    """Asserts that a loop leaves the same bits with state on the disk; steps that keep something are made anew."""
    stage, late = STREAMED[how]
    made = (lambda: None) if step is None else step
    assert_same(steps(make, on_disk(path, overlap=late), stage, made()), steps(make, None, stage, made()))


class Stumbling(torch.optim.AdamW):
    """Fails once before it has stepped anything, in the main thread."""

    fails = False

    def step(self, closure=None):
        if type(self).fails and threading.current_thread() is threading.main_thread() and len(self.state) > 1:
            type(self).fails = False
            raise ArithmeticError("a step stumbles")
        return super().step(closure)


def stumble(*_):
    raise ArithmeticError("a hook stumbles")


@for_each(how=STREAMED, where=("hook", "step"))
@pytest.mark.ranks(1)
def test_failed_step_is_made_when_called_again(how, where, tmp_path):
    """Pieces that were stepped before it failed are not stepped twice, and gradients stay for what is added to them."""

    def failing():
        def step(number, optimizer, module):
            if number in (1, 2):
                hook = None
                if where == "hook":
                    hook = optimizer.register_step_pre_hook(stumble)
                else:
                    Stumbling.fails = True
                with pytest.raises(ArithmeticError, match="stumbles"):
                    optimizer.step()
                if hook is not None:
                    hook.remove()
            optimizer.step()
            if number == 2:  # what is added to gradients that stay
                loss_of(module, batch(9, width=8)).backward()
                optimizer.step()

        return step

    compare(lambda parameters: Stumbling(parameters, lr=1e-2), tmp_path, how, failing)


class Ignoring(torch.optim.Optimizer):
    """Takes a closure as optimizers do, and never calls it. What it keeps is None until its second step."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["slow"] = parameter.clone() if state and state["slow"] is None else state.get("slow")
                if state["slow"] is not None:
                    state["slow"].lerp_(parameter, 0.1)
                    parameter.lerp_(state["slow"], 0.5)
                parameter.sub_(parameter.grad, alpha=group["lr"])


@for_each(how=STREAMED)
@pytest.mark.ranks(1)
def test_optimizer_with_late_state_and_no_closure_is_offloaded(how, tmp_path):
    compare(Ignoring, tmp_path, how)

    def lies_there():
        def step(number, optimizer, _):
            optimizer.step()
            tensors = optimizer.param_groups[0]["params"]
            settle_(tensors)
            for tensor in tensors if number else ():
                assert optimizer.state[tensor]["slow"] is slots_of(tensor)["slow"]

        return step

    stage, late = STREAMED[how]
    steps(Ignoring, on_disk(tmp_path, overlap=late), stage, lies_there())


def cleared():
    def step(number, optimizer, _):
        if number == 2:
            optimizer.state.clear()
        optimizer.step()

    return step


def momentum_later():
    def step(number, optimizer, _):
        optimizer.param_groups[0]["momentum"] = 0.9 if number else 0
        optimizer.step()

    return step


def inferring():
    def step(_, optimizer, module):
        with torch.inference_mode():
            module(batch(7, width=8))
            optimizer.step()

    return step


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step(number, optimizer, module):
        optimizer.zero_grad()
        loss = loss_of(module, batch(number, width=8)) * (float("inf") if number == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def forking():
    def step(_, optimizer, __):
        optimizer.step()
        if (child := os.fork()) == 0:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    return step


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


LOOPS = {
    "state that is cleared": (small, cleared),
    "a slot that a setting brings later": (momentum, momentum_later),
    "steps in inference mode": (small, inferring),
    "torch's scaler, which skips a step": (small, scaled),
    "forks while bytes move": (small, forking),
}


@for_each(how=STREAMED, loop=LOOPS)
@pytest.mark.ranks(1)
def test_program_actions_between_steps_change_no_number(how, loop, tmp_path):
    make, step = LOOPS[loop]
    compare(make, tmp_path, how, step)


@pytest.mark.ranks(1)
def test_offloaded_optimizer_is_copied_and_pickled(tmp_path):
    module = mlp()
    optimizer = small(module.parameters())
    shard(
        module,
        optimizer,
        stage=3,
        group=dist.group.WORLD,
        offload=on_disk(tmp_path, overlap=True),
        overlap={"bucket": 300},
    )
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    expected = moments(optimizer)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        settle_(other.param_groups[0]["params"])  # which concerns nobody
        found = moments(other)
        assert {float(found.pop(name)) for name in list(found) if name.startswith("step")} == {1}  # some have no names
        assert_same(found, {name: value for name, value in expected.items() if not name.startswith("step")})
    for other in (copy.deepcopy(state), torch.load(file)):
        optimizer.step()
        optimizer.load_state_dict(other)
        assert_same(moments(optimizer), expected)


@for_each(how=STREAMED)
@pytest.mark.ranks(1)
def test_deleted_model_closes_files_buffers_and_threads(how, tmp_path):
    def there():
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    stage, late = STREAMED[how]
    before, others = there(), set(threading.enumerate())  # such as the threads of a backend
    steps(small, on_disk(tmp_path, overlap=late), stage)
    gc.collect()
    for thread in set(threading.enumerate()) - others:
        thread.join(100)
    assert there() == before
