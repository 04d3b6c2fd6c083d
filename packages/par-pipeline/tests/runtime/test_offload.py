"""What a rank keeps: no output that is sent, and no more bytes than an offload allows."""

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import Offload, gpipe, one_f_one_b, zb_v
from par_pipeline.runtime.offload import from_host, to_host
from par_testing import for_each

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


@for_each(name=["gpipe", "1f1b", "zb_v"])
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
        offload = Offload(resident=limit, store=disk.store, load=disk.load)
        pipeline(stages, schedule, offload=offload).step(x.requires_grad_(), target=y)
        assert_gradients(stages, reference, schedule, exact=name in WHOLE)
        waiting[limit] = max(
            sum(each) for each in zip(*(stage.waiting for stage in mine(stages, schedule)), strict=True)
        )
        assert (disk.count == 0) == (limit == 10**9)
    assert waiting[0] == 0
    assert waiting[4 * one] <= 4 * one
    assert waiting[10**9] >= 8 * one or (name != "gpipe" and dist.get_rank() == 1)  # where none wait there


def test_host_memory_is_the_tensor_itself_on_the_cpu():
    tensor = torch.ones(3)
    assert from_host(to_host(tensor)) is tensor
    with pytest.raises(ValueError, match="resident is -1 bytes"):
        Offload(resident=-1)


@pytest.mark.ranks(2)
def test_offload_to_the_host_gives_the_same_gradients():
    for make in (one_f_one_b, zb_v):
        schedule = make(2, 3)
        stages = stages_of(schedule)
        reference = copied(stages)
        run = pipeline(stages, schedule, offload=Offload(resident=100))
        x, y = data(7)
        run.step(x, target=y)
        serial(reference, x.tensor_split(3), y.tensor_split(3))
        assert_gradients(stages, reference, schedule, exact=make is one_f_one_b)
