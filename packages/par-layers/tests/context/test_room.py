"""Memory that one message after another uses."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from par_groups import ProcessGroups, Topology
from par_layers import Context
from par_layers.context.room import MessageBuffer


def test_the_next_message_uses_the_memory_of_the_last():
    room, like = MessageBuffer(), torch.empty(0, dtype=torch.float64)
    with room.of(100, like) as first:
        assert first.shape == (100,)
        assert first.dtype == torch.float64
        place = first.data_ptr()
        with room.of(10, like) as beside:  # as a second thread would, meanwhile
            beside.fill_(1)
            first.fill_(2)
            assert beside.eq(1).all()
    with room.of(150, torch.empty(0)) as smaller:  # 600 bytes of 800
        assert smaller.data_ptr() == place
    with room.of(101, like) as larger:
        assert larger.shape == (101,)


def test_a_copy_has_memory_of_its_own():
    room = MessageBuffer()
    with room.of(8, torch.empty(0)) as message:
        place = message.data_ptr()
    with copy.deepcopy(room).of(8, torch.empty(0)) as other, room.of(8, torch.empty(0)) as again:
        assert again.data_ptr() == place != other.data_ptr()


def test_fake_tensors_and_other_devices_are_never_kept():
    room = MessageBuffer()
    with room.of(8, torch.empty(0, device="meta")) as message:
        assert message.device.type == "meta"
    with FakeTensorMode(), room.of(8, torch.empty(0)):
        pass
    with room.of(8, torch.empty(0)) as message:
        assert type(message) is torch.Tensor
        assert message.device.type == "cpu"


@pytest.mark.ranks(2)
def test_attention_after_attention_leaves_the_results_of_the_first_alone():
    context = Context(ProcessGroups(Topology.from_config({"sequence": 2}, 2)), mode="ulysses")
    torch.manual_seed(0)
    rows = [tuple(torch.randn(1, 16, 4, 8).requires_grad_() for _ in range(3)) for _ in range(2)]

    def gradients(row, out):
        return torch.autograd.grad(out, row, torch.ones_like(out))

    alone = [(out := context.attention(*row), *gradients(row, out)) for row in rows]
    kept = [tuple(x.clone() for x in results) for results in alone]
    outs = [context.attention(*row) for row in rows]  # both forwards before the first backward
    together = [(out, *gradients(row, out)) for row, out in zip(rows, outs, strict=True)]
    for found in (alone, together):
        for a, b in zip(found, kept, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
