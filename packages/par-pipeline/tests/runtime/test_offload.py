"""What a rank keeps: no output that is sent, and no more bytes than an offload allows."""

import gc
import math
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from par_groups import HostCopies, HostCopy
from par_pipeline import ActivationOffload, gpipe, one_f_one_b, zb_v
from par_pipeline.runtime import offload as _offload
from par_pipeline.runtime.offload import Activations
from par_testing import for_each, storm

from ..runtime_helpers import (
    SCHEDULES,
    WHOLE,
    assert_gradients,
    block,
    copied,
    data,
    mine,
    pipeline,
    serial,
    stages_of,
)


@pytest.mark.ranks(2)
def test_the_memory_of_an_output_is_free_once_it_is_sent_unless_autograd_has_saved_it():
    class Watched(nn.Module):
        def __init__(self, number, *, saved):
            super().__init__()
            self.inner, self.saved, self.outputs, self.alive = nn.Linear(5, 5).double(), saved, [], []

        def count(self, gradient):
            self.alive.append(sum(each() is not None for each in self.outputs))

        def forward(self, x):
            if not x.requires_grad:  # the first stage's
                x = x.detach().requires_grad_()
                x.register_hook(self.count)
            y = self.inner(x).tanh() if self.saved else self.inner(x)
            self.outputs.append(weakref.ref(y.untyped_storage()))
            return y

    schedule = gpipe(2, 3)
    for saved in (False, True):
        stages = stages_of(schedule, lambda number, saved=saved: Watched(number, saved=saved))
        run = pipeline(stages, schedule)
        for _ in range(2):
            for stage in stages:
                stage.outputs, stage.alive = [], []
            x, y = data(6)
            run.step(x, target=y)
        if dist.get_rank() == 0:
            assert stages[0].alive[0] == (2 if saved else 0)  # those of the microbatches that wait


class Disk:
    """Stores tensors in files, and knows how many bytes it was given."""

    def __init__(self, folder):
        self.folder, self.count = Path(folder), 0

    def store(self, tensor):
        self.count += 1
        path = self.folder / f"{dist.get_rank()}_{self.count}.pt"
        torch.save(tensor.detach().clone(), path)
        return path

    def load(self, path):
        return torch.load(path)


class Chain(nn.Module):
    """Squares, whose inputs autograd saves. Notes the bytes of earlier microbatches' that are still there."""

    def __init__(self, number):
        super().__init__()
        self.inner, self.number, self.watch, self.waiting = block(5, number), number, [], []

    def forward(self, x):
        self.waiting.append(sum(ref().nbytes() for ref in self.watch if ref() is not None))
        if self.number:  # the batch stays with the caller
            self.watch.append(weakref.ref(x.untyped_storage()))
        for _ in range(8):
            x = x * x * 0.5
            self.watch.append(weakref.ref(x.untyped_storage()))
        return self.inner(x)


@for_each(name=[storm("gpipe"), "1f1b", "zb_v"])
@pytest.mark.ranks(2)
def test_offload_bounds_what_waits_and_changes_no_gradient(name, tmp_path):
    schedule = SCHEDULES[name](2, 6)
    stages = stages_of(schedule, Chain)
    reference = copied(stages)
    x, y = data(6 * 20)
    serial(reference, x.tensor_split(6), y.tensor_split(6))
    one = 20 * 5 * 8  # bytes of a tensor
    waiting = {}
    for limit in (0, 4 * one, 10**9):
        disk = Disk(tmp_path)
        for stage in stages:
            stage.zero_grad()
            stage.watch, stage.waiting = [], []
        offload = ActivationOffload(resident=limit, store=disk.store, load=disk.load)
        pipeline(stages, schedule, offload=offload).step(x.requires_grad_(), target=y)
        assert_gradients(stages, reference, schedule, exact=name in WHOLE)
        waiting[limit] = max(
            sum(each) for each in zip(*(stage.waiting for stage in mine(stages, schedule)), strict=True)
        )
        assert (disk.count == 0) == (limit == 10**9)
    assert waiting[0] == 0
    assert waiting[4 * one] <= 4 * one
    assert waiting[10**9] >= 8 * one or (name != "gpipe" and dist.get_rank() == 1)  # where none wait there


def test_tensors_of_the_cpu_are_not_offloaded_to_the_host():
    activations, x = Activations(ActivationOffload(), ()), torch.ones(3, requires_grad=True)
    with activations.saving((0, 0)):
        out = x * x
    assert out.grad_fn._saved_self.data_ptr() == x.data_ptr()


class Metadata:
    """Something that a node of a graph holds, and that can be watched."""


def graph_without_backward(offload):
    """What dies with the graph of a forward that nobody goes back through, as of one that failed or was evaluated."""
    saving = Activations(offload, ()).saving((0, 0))
    with saving:
        out = torch.ones(3, requires_grad=True).tanh()  # which saves its own output
    out.grad_fn.metadata["watched"] = watched = Metadata()
    return weakref.ref(watched)


def test_a_graph_without_backward_is_free_as_soon_as_nobody_has_it():
    gc.disable()
    try:
        for offload in (
            ActivationOffload(),
            ActivationOffload(resident=10**6),
            ActivationOffload(store=lambda tensor: tensor, load=lambda it: it),
        ):
            assert graph_without_backward(offload)() is None, offload
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"resident": -1}, "resident is -1 bytes"),
        ({"store": torch.clone}, "set store and load together"),
        ({"fetch": torch.clone}, "only \\['fetch'\\] of store, load and fetch is set"),
    ],
)
def test_what_an_offload_refuses(keywords, message):
    with pytest.raises(ValueError, match=message):
        ActivationOffload(**keywords)


class LateStreams(TorchDispatchMode):
    """Streams as late as an accelerator's may be: a copy is made when something waits for it, and is NaN until then.

    In the place of torch.cuda, for tensors of the CPU. Memory that is freed while a copy reads it is read as NaN.
    """

    def __init__(self):
        super().__init__()
        self.computing = self.current = LateStream(self)
        self.log, self.made = [], []

    def Stream(self, device):
        self.made.append(LateStream(self))
        return self.made[-1]

    def current_stream(self, device):
        return self.computing

    @contextmanager
    def stream(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = self.computing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or self.current is self.computing:
            return func(*args, **(kwargs or {}))
        target, source = (weakref.ref(each) for each in args[:2])

        def late():
            there = source() is not None and source().untyped_storage().nbytes() > 0
            if target() is not None:
                target().data.copy_(source().data if there else torch.tensor(math.nan))

        self.current.late.append(late)
        return args[0].fill_(math.nan)


class LateStream:
    def __init__(self, streams):
        self.streams, self.late, self.ran = streams, [], 0

    def record_event(self):
        return self, self.ran + len(self.late)

    def wait_event(self, event):
        stream, place = event
        self.streams.log.append("computation waits" if self is self.streams.computing else "copy waits")
        while stream.ran < place:
            stream.ran += 1
            stream.late.pop(0)()

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


@for_each(name=[storm("gpipe"), "1f1b", "zb_v"])
@pytest.mark.ranks(2)
def test_host_copies_are_waited_for_and_none_is_wasted(name, monkeypatch):
    schedule = SCHEDULES[name](2, 8)
    stages = stages_of(schedule)
    reference = copied(stages)
    x, y = data(8 * 4)
    serial(reference, x.tensor_split(8), y.tensor_split(8))
    late, was_there = LateStreams(), []
    load = HostCopy.load

    def watched(copy):
        was_there.append(copy.is_on_device)
        return load(copy)

    monkeypatch.setattr(_offload, "HostCopies", lambda: HostCopies(late))
    monkeypatch.setattr(HostCopy, "load", watched)
    run = pipeline(stages, schedule, offload=ActivationOffload())
    with late:
        run.step(x, target=y)
    assert_gradients(stages, reference, schedule, exact=name in WHOLE)
    if name == "1f1b":  # of two stages: each backward comes right after its forward, or after the next one
        assert was_there == late.made == []
        return
    assert set(was_there) == {True}  # nothing is loaded whose copy back has not begun
    assert {"computation waits", "copy waits"} <= set(late.log)
    out, into = late.made
    assert not out.late
    assert not into.late
    assert out.ran == into.ran == len(was_there)


def test_received_tensor_is_freed_after_its_copy_out():
    late = LateStreams()
    activations = Activations(ActivationOffload(), (), HostCopies(late))
    received = [torch.full((3,), float(number), requires_grad=True) for number in range(6)]
    activations.begin(
        [(True, (0, number)) for number in range(6)] + [(False, (0, number)) for number in range(5, -1, -1)]
    )
    with late:
        outputs, sizes = [], []
        for number, x in enumerate(received):
            with activations.saving((0, number)):
                outputs.append(x * x * 1.0)
            activations.free_([x], outputs[-1])
            sizes.append([each.untyped_storage().nbytes() > 0 for each in received[: number + 1]])
    # The forwards of two microbatches are on the device. The last two stay, as their backwards begin soon.
    assert [sum(size) for size in sizes] == [1, 2, 2, 2, 2, 2]
    assert [each.untyped_storage().nbytes() > 0 for each in received] == [False] * 4 + [True] * 2
    with late:
        for number in range(5, -1, -1):
            activations.approach((0, number))
            (gradient,) = torch.autograd.grad(outputs[number].sum(), received[number])
            activations.done((0, number))
            assert gradient.tolist() == [2.0 * number] * 3


@pytest.mark.ranks(1)
def test_two_microbatches_are_on_their_way_when_a_backward_begins():
    schedule = gpipe(1, 5)
    seen = {}

    class Marked(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.inner = block(5, number)

        def forward(self, x):
            number = len(seen)
            seen[number] = 0
            x = x * 1.0
            x.register_hook(lambda _: waiting.append((number, sorted(fetched))))
            return self.inner(x)

    waiting, fetched, owner = [], set(), {}
    kept = []

    def store(tensor):
        kept.append(tensor)
        owner[len(kept) - 1] = len(seen) - 1
        return len(kept) - 1

    def fetch(number):
        fetched.add(owner[number])

    stages = stages_of(schedule, Marked)
    x, y = data(5)
    offload = ActivationOffload(store=store, load=kept.__getitem__, fetch=fetch)
    pipeline(stages, schedule, offload=offload).step(x.requires_grad_(), target=y)
    assert [number for number, _ in waiting] == [0, 1, 2, 3, 4]
    assert [max(on_their_way) for _, on_their_way in waiting] == [2, 3, 4, 4, 4]


@pytest.mark.ranks(2)
def test_offload_to_the_host_gives_the_same_gradients():
    for make in (one_f_one_b, zb_v):
        schedule = make(2, 3)
        stages = stages_of(schedule)
        reference = copied(stages)
        run = pipeline(stages, schedule, offload=ActivationOffload(resident=100))
        x, y = data(7)
        run.step(x, target=y)
        serial(reference, x.tensor_split(3), y.tensor_split(3))
        assert_gradients(stages, reference, schedule, exact=make is one_f_one_b)
