"""Parameters on their way after a step of stages 1 and 2: whoever reads one reads what all ranks have made of it.

On strict ranks memory that is not waited for is NaN, so a reader that does not wait is seen.
"""

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each, storm
from par_zero import Offload, reset, shard, summon
from par_zero._arrive import ArrivingParameter, watch_compiles

from .helpers import adamw, assert_same, batch, copies, deferred, loss_of, mlp, sgd, train

LATE = (1, 2)


def stepped(stage):
    """A module of several chunks right after a step, nothing of it read since; its optimizer; and how it should be."""
    return *after_a_step(stage), at_stage_0()


def after_a_step(stage):
    module = mlp()
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    return module, optimizer


@functools.cache
def at_stage_0():
    """What a step makes of all parameters there."""
    return copies(after_a_step(0)[0])


def on_their_way(module):
    return [name for name, parameter in module.named_parameters() if type(parameter) is not nn.Parameter]


def saved(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


READERS = {
    "data": lambda module: {name: each.data.clone() for name, each in module.named_parameters()},
    "detach": lambda module: {name: each.detach().clone() for name, each in module.named_parameters()},
    "state_dict": lambda module: module.state_dict(),
    "state_dict, keep_vars": lambda module: {n: p.detach() for n, p in module.state_dict(keep_vars=True).items()},
    "torch.save": saved,
    "attribute": lambda module: {
        f"{i}.{j}.{name}": getattr(module[i][j], name) + 0
        for i in range(3)
        for j in (0, 2)
        for name in ("weight", "bias")
    },
    "numpy": lambda module: {
        name: torch.from_numpy(each.detach().numpy().copy()) for name, each in module.named_parameters()
    },
    "deepcopy": lambda module: {name: copy.deepcopy(each).detach() for name, each in module.named_parameters()},
    "foreach": lambda module: dict(
        zip([n for n, _ in module.named_parameters()], torch._foreach_add([*module.parameters()], 0.0), strict=True)
    ),
    "lerp_": lambda module: {name: torch.zeros_like(each).lerp_(each, 1.0) for name, each in module.named_parameters()},
}


@for_each(stage=LATE, reader=READERS)
@pytest.mark.ranks(2, backend="strict")
def test_a_reader_between_step_and_forward_reads_what_was_made(stage, reader):
    module, _, expected = stepped(stage)
    assert len(on_their_way(module)) == len(expected)
    assert_same({name: each.detach() for name, each in READERS[reader](module).items()}, expected)
    assert on_their_way(module) == []


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_who_holds_parameters_from_before_reads_them_right(stage):
    module = mlp()
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    held = list(module.parameters())
    loss_of(module, batch(0, width=8)).backward()
    optimizer.step()
    *_, expected = stepped(stage)
    norms = torch._foreach_norm(held)
    torch.testing.assert_close(torch.stack(norms), torch.stack([each.norm() for each in expected.values()]))


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_module_dropped_with_gathers_in_flight_is_freed(stage):
    module, optimizer = after_a_step(stage)
    assert on_their_way(module)
    alive = weakref.ref(module)
    del module, optimizer
    gc.collect()
    assert alive() is None


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_parameters_that_outlive_their_module_arrive(stage):
    module, optimizer = after_a_step(stage)
    held = dict(module.named_parameters())
    del module, optimizer
    gc.collect()
    assert_same({name: each.detach() for name, each in held.items()}, at_stage_0())


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_a_forward_waits_chunk_by_chunk(stage):
    module, _, _ = stepped(stage)
    seen = []
    for block in module:
        block.register_forward_hook(lambda *_: seen.append(len(on_their_way(module))))
    loss_of(module, batch(1, width=8))
    whole = len(list(module.parameters()))
    assert whole > seen[0] > seen[1] > seen[2] == 0


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_what_reads_no_values_does_not_wait(stage):
    module, optimizer, _ = stepped(stage)
    before = on_their_way(module)
    optimizer.zero_grad()
    module.zero_grad()
    module.train()
    for parameter in module.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is None
        assert parameter.requires_grad
        assert (parameter.shape, parameter.dtype, parameter.device) == (
            parameter.size(),
            torch.float32,
            torch.device("cpu"),
        )
        assert parameter.numel() == parameter.shape.numel()
        assert hash(parameter) == id(parameter)
    assert on_their_way(module) == before


class Within(nn.Module):
    """Reads the weight of a layer that it never calls, as attention does, and calls another one behind that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x * self.last.weight.norm()
        return self.last(nn.functional.linear(self.first(x), self.inner.weight, self.inner.bias))


@for_each(make=(Within, storm(mlp)), evaluates=(False, True), looks=(False, True))
@pytest.mark.ranks(2, backend="strict")
def test_several_steps_equal_those_of_stage_0(make, evaluates, looks):
    results = []
    for each in (0, *LATE):
        module = make()
        optimizer = adamw(module.parameters())
        shard(module, optimizer, stage=each, group=dist.group.WORLD, overlap={"bucket": 300})
        for step in range(3):
            train(module, optimizer, [[batch(step, width=8), batch(step, width=8, micro=1)]], deferred=deferred(module))
            if evaluates:
                with torch.no_grad():
                    assert loss_of(module, batch(step, width=8)).isfinite()
            if looks:
                optimizer.step()  # without a gradient in between, and without a forward
        results.append(copies(module))
    for result in results[1:]:
        assert_same(result, results[0])


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_an_optimizer_waits_for_its_own_parameters_alone(stage):
    results = []
    for each in (0, stage):
        module = mlp()
        matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
        vectors = [parameter for parameter in module.parameters() if parameter.ndim == 1]
        optimizers = [sgd(matrices), adamw(vectors)]
        shard(module, optimizers, stage=each, group=dist.group.WORLD, overlap={"bucket": 300})
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            for number, optimizer in enumerate(optimizers):
                optimizer.step()
                arriving = (len(matrices), len(matrices) + len(vectors))[number] if each else 0
                assert len(on_their_way(module)) == arriving
                optimizer.zero_grad()
        results.append(copies(module))
    assert_same(*results)


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_summon_reset_and_a_load_wait(stage):
    module, _, expected = stepped(stage)
    with summon(module):
        assert on_their_way(module) == []
    module, _, _ = stepped(stage)
    reset(module)
    assert on_their_way(module) == []
    module, _, _ = stepped(stage)
    module.load_state_dict({name: each + 1 for name, each in expected.items()})
    assert_same(copies(module), {name: each + 1 for name, each in expected.items()})


@for_each(stage=LATE)
@pytest.mark.ranks(2, backend="strict")
def test_who_reads_past_torchs_functions_is_named(stage):
    module, _, _ = stepped(stage)
    with torch._C.DisableTorchFunctionSubclass():  # as an extension in C++ does
        loss = loss_of(module, batch(1, width=8))
    with pytest.raises(RuntimeError, match=r"'2.2.\w+' was read after a step while it was on its way"):
        loss.backward()
    reset(module)


class Calling(Within):
    """Passes a weight to a compiled function, which no search of its modules finds."""

    def __init__(self):
        super().__init__()
        self.scaled = torch.compile(nn.functional.linear, backend="eager", fullgraph=True)

    def forward(self, x):
        return super().forward(self.scaled(x, self.inner.weight))


def compiled_whole(module):
    return torch.compile(module, backend="eager", fullgraph=True)


def compiled_in_place(module):
    module.compile(backend="eager", fullgraph=True)
    return module


def compiled_around(module):
    # The hooks of a sharded module break the graph.
    return torch.compile(lambda x: module(x.clone()), backend="eager")


class Own(nn.Linear):
    """A class of its own: torch.compile skips the forward of torch's linear if it is compiled in place."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def compiled_part(module):
    module.last.__class__ = Own
    module.last.compile(backend="eager", fullgraph=True)
    return module


def compiled_forward(module):
    module.forward = torch.compile(module.forward, backend="eager", fullgraph=True)
    return module


def as_it_is(module):
    return module


COMPILED = {
    "whole": (Within, compiled_whole),
    "in place": (Within, compiled_in_place),
    "a function around": (Within, compiled_around),
    "a part": (Within, compiled_part),
    "its forward": (Within, compiled_forward),
    "a function within": (Calling, as_it_is),
}
WHEN = ("before shard", "before shard, and called", "before a step", "after a step")


def trained(stage, make, compiles, when):
    """Return the parameters after some steps, and how many parameters were late after each."""
    torch.compiler.reset()
    module, late = make(), []
    run = compiles(module) if when.startswith("before shard") else module
    if "called" in when:
        for step in (0, 1):
            loss_of(run, batch(step, width=8)).backward()
        module.zero_grad()
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    run = compiles(module) if when == "before a step" else run
    for step in range(4):
        if step == 1 and when == "after a step":
            run = compiles(module)
        train(run, optimizer, [[batch(step, width=8)]])
        late.append(len(on_their_way(module)))
    return copies(module), late


@functools.cache
def uncompiled(make):
    return trained(0, make, as_it_is, "before shard")[0]


# The tracer reads the gradients of all inputs, also of those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@for_each(case=COMPILED, when=WHEN)
@pytest.mark.ranks(2, backend="strict", timeout=240)
def test_compiled_code_that_reads_parameters_ends_late_arrivals(case, when):
    make, compiles = COMPILED[case]
    found, late = trained(2 if when == "after a step" else 1, make, compiles, when)
    # A step that is taken before anything was compiled may be late, and so may the one before an older graph is used.
    assert late[1:] == [0, 0, 0]
    assert_same(found, uncompiled(make))


class Compiling(torch.optim.AdamW):
    """Calls a compiled function in its steps."""

    def __init__(self, parameters, call):
        super().__init__(parameters, lr=1e-2, eps=1e-3)
        self.call = call

    def step(self, closure=None):
        self.call(torch.ones(2))
        return super().step(closure)


@for_each(stage=LATE, called=("never", "before shard", "in a step", "between steps"))
@pytest.mark.ranks(2, backend="strict")
def test_unrelated_function_ends_late_arrivals_between_steps(stage, called):
    results = []
    for each in (0, stage):
        torch.compiler.reset()
        unrelated = torch.compile(lambda x: x + 1, backend="eager")  # as a package does on import
        if called == "before shard":
            unrelated(torch.ones(2))
        module = Within()
        optimizer = Compiling(module.parameters(), unrelated if called == "in a step" else torch.clone)
        shard(
            module, optimizer, stage=each, group=dist.group.WORLD, overlap={"bucket": 300}, update={"elementwise": True}
        )
        late = []
        for step in range(3):
            train(module, optimizer, [[batch(step, width=8)]])
            late.append(len(on_their_way(module)))
            if called == "between steps":  # as a data loader might
                unrelated(torch.ones(2))
                assert on_their_way(module) == []
        whole = len(list(module.parameters())) if each else 0
        assert late == ([whole, 0, 0] if called == "between steps" else [whole] * 3)
        results.append(copies(module))
    assert_same(*results)


class CallingPlain(nn.Module):
    """Calls a function of no parameter within its forward."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call

    def forward(self, x):
        self.call(torch.ones(2))
        return self.last(self.first(x))


def compiled_each_time(_):
    """Call a function that nobody has compiled before."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def stepped_on_host(stage, in_step, in_forward):
    """Return parameters after steps in a thread, and how many were late after each."""
    module = CallingPlain(in_forward).to("strict")
    optimizer, late = Compiling(module.parameters(), in_step), []
    how = {"offload": Offload(optimizer="host", piece="4KiB"), "update": {"elementwise": True}}
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300}, **how)
    for step in range(3):
        loss_of(module, batch(step, width=8).to("strict")).backward()
        optimizer.step()
        # Between steps the parameters have another class of their own, which watches writes.
        late.append(sum(isinstance(each, ArrivingParameter) for each in module.parameters()))
        optimizer.zero_grad()
    return {name: each.cpu() for name, each in copies(module).items()}, late


# If a wait under torch's lock and the thread that needs the lock wait for each other, the ranks time out.
@for_each(stage=(0, 1), compiles=("in the step", "in forward", "in both", "anew in the step", "anew in both"))
@pytest.mark.accelerator(races="error")
@pytest.mark.ranks(2, backend="strict", timeout=120)
def test_step_in_a_thread_that_compiles_ends(stage, compiles):
    torch.compiler.reset()
    expected, late = stepped_on_host(stage, torch.clone, torch.clone)
    assert late == [4, 4, 4]
    calls = [torch.clone, torch.clone]
    for number, place in enumerate(("step", "forward")):
        if compiles.endswith((place, "both")):
            compiled = torch.compile(lambda x, by=number: x + by, backend="eager")
            calls[number] = compiled_each_time if "anew" in compiles else compiled
    found, late = stepped_on_host(stage, *calls)
    assert late[1:] == [0, 0]
    assert_same(found, expected)


@pytest.mark.ranks(2, backend="gloo")
def test_over_gloo_a_step_waits():
    torch.compiler.reset()
    module, _, expected = stepped(2)
    assert on_their_way(module) == []
    assert_same(copies(module), expected)
    # Nothing can be late, so nothing is called before a forward or before torch compiles.
    assert torch._dynamo.callback_handler.start_callbacks == []
    assert all(getattr(hook, "func", None) is not watch_compiles for hook in module._forward_pre_hooks.values())
