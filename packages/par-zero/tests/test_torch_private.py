"""Every underscore name of torch that is used, by itself: this file fails first when a new torch breaks something."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import is_compiled
from par_zero import _torch_private as private


@pytest.mark.ranks(1, backend="gloo")
def test_every_one_does_what_it_is_used_for():
    one, other = torch.zeros(3), torch.arange(3.0)
    private.foreach_copy_([one], [other])
    private.foreach_add_([one], [other])
    assert one.tolist() == [0, 2, 4]

    x = torch.ones(2, requires_grad=True)
    notes = []

    def hook(_):
        notes.append(private.current_pass() != -1)
        private.call_at_end_of_backward(lambda: notes.append("end"))

    y = x * 2
    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda _: notes.append("gradient"))
    y.sum().backward()
    assert notes == [True, "gradient", "end"]
    assert private.current_pass() == -1

    asked, unasked, told = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    for run in (torch.Tensor.backward, lambda total: torch.autograd.grad(total, asked)):
        z = asked * 2
        z.register_hook(lambda _: told.append([private.will_get_gradient(each) for each in (asked, unasked, other)]))
        run(z.sum())
    assert told == [[True, False, False], [False, False, False]]

    version = one._version
    with private.without_new_version(one):
        one.zero_()
    assert one._version == version

    class Sent(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_):
            raise AssertionError("sent through the class")

    sent = torch.ones(2).as_subclass(Sent)
    with private.without_torch_functions():
        assert sent.numel() == 2

    torch.compiler.reset()
    assert not private.has_compiled()

    class Compiles:
        number = 0

        def count(self):
            self.number += 1

    compiles = Compiles()
    for _ in range(2):
        private.call_before_compile(compiles.count)
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    assert private.has_compiled()
    assert compiles.number == 0
    doubled(one)
    doubled(one)
    assert compiles.number == 1
    calls = len(torch._dynamo.callback_handler.start_callbacks)
    del compiles
    assert len(torch._dynamo.callback_handler.start_callbacks) == calls - 1
    module = nn.Linear(2, 2)
    assert not is_compiled(module)
    found = []
    skipped = private.skip_frame(lambda *_: found.append(callable(private.compiles_frames())))
    module.register_forward_pre_hook(skipped)
    assert is_compiled(torch.compile(module, backend="eager"))
    module(one[:2])
    module.compile(backend="eager")
    assert is_compiled(module)
    module(one[:2])
    assert found == [False, True]

    assert private.tree_leaves(OrderedDict(a=[one, 3])) == [one, 3]
    assert private.tree_leaves(notes) == notes
    (leaf,) = private.tree_leaves(nn.Identity)
    assert leaf is nn.Identity

    linear = nn.Linear(2, 2)
    assert private.own_parameters(linear)["weight"] is linear.weight
    assert not private.own_parameters(nn.Sequential(linear))
    assert private.own_modules(nn.Sequential(linear)) == {"0": linear}
    linear.register_buffer("kept", one)
    linear.register_buffer("fixed", other, persistent=False)
    assert private.own_buffers(linear) == {"kept": one, "fixed": other}
    assert private.unsaved_buffers(nn.Sequential(linear)) == [other]

    heard = []
    optimizer = torch.optim.SGD(linear.parameters())
    private.call_first_after_step(optimizer, lambda *_: heard.append("first"))
    private.call_last_before_step(optimizer, lambda *_: heard.append("at last"))
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("last"))
    optimizer.register_step_post_hook(lambda optimizer, *_: heard.append(private.is_within_step(optimizer)))
    optimizer.step()
    assert heard == ["before", "at last", "first", "last", False]
    assert dist.get_world_size() == 1
