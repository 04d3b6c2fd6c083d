"""torch still has everything private that this package uses, with the meaning that it counts on."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from par_recompute import _torch_private as private


def test_the_hooks_around_are_the_innermost():
    assert private.outer_hooks() is None

    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    with saved_tensors_hooks(str, str), saved_tensors_hooks(pack, unpack):
        assert private.outer_hooks() == (pack, unpack)
    assert private.outer_hooks() is None


def test_a_storage_keeps_its_identity_while_a_weak_reference_is_there():
    storages = [torch.empty(8).untyped_storage() for _ in range(4)]
    identities = {private.identity_of(storage) for storage in storages}
    alive = [private.StorageWeakRef(storage) for storage in storages]
    del storages
    assert all(each.expired() for each in alive)
    others = [torch.empty(8) for _ in range(100)]
    assert not identities & {private.identity_of(other.untyped_storage()) for other in others}


def test_fake_tensors_have_storages_of_their_own():
    with private.FakeTensorMode() as mode:
        real = nn.Parameter(torch.empty(3))
        fake = mode.from_tensor(real)
        view, other = fake[1:], fake + 1
    assert type(fake) is type(other) is private.FakeTensor
    assert fake.untyped_storage().nbytes() == 12
    assert private.identity_of(view.untyped_storage()) == private.identity_of(fake.untyped_storage())
    assert private.identity_of(other.untyped_storage()) != private.identity_of(fake.untyped_storage())


def test_writing_raises_the_version():
    tensor = torch.zeros(2)
    before = private.version_of(tensor.detach())
    tensor.add_(1)
    assert private.version_of(tensor.detach()) == before + 1


def test_a_negated_view_is_read_with_the_other_sign():
    tensor = torch.ones(2)
    view = private.negated(tensor)
    assert view.is_neg()
    assert torch.equal(view, -tensor)
    assert private.identity_of(view.untyped_storage()) == private.identity_of(tensor.untyped_storage())


def test_a_checkpoint_a_transform_and_a_compiler_around_are_known():
    seen = []

    def look(x):
        seen.append((private.in_checkpoint(), private.in_transform(), callable(private.compiles_frames())))
        return x.sin().sum()

    x = torch.ones(2, requires_grad=True)
    look(x)
    torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False).backward()
    torch.func.grad(look)(x.detach())
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        look(x)
    neither = (False, False, False)
    assert seen == [neither, (True, False, False), (True, False, False), (False, True, False), neither]

    class Broken(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            compiling.append(private.compiles_frames())
            return x + 1

    compiling = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be traced
        torch.compile(Broken(), backend="eager")(x)
    assert callable(compiling[0])
    assert private.compiles_frames() is None


def test_a_checkpoint_is_two_steps_around_a_forward():
    layer, given, calls = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), []

    def again(x, *, power):
        calls.append(power)
        return layer(x).pow(power)

    generator = private.checkpointed(again, None, (given,), {"power": 3})
    next(generator)
    output = layer(given).pow(3)
    with pytest.raises(StopIteration):
        next(generator)
    output.sum().backward()
    assert calls == [3]


def test_a_mode_sees_operations_and_what_they_are():
    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            seen.append((func, private.flops_of(func, args, kwargs or {}, output)))
            return output

    seen = []
    q = torch.ones(1, 2, 4, 8)
    with Mode():
        torch.ones(2, 3) @ torch.ones(3, 5)
        torch.rand(2)
        q.view(-1)
        F.scaled_dot_product_attention(q, q, q)
    by_name = {func.overloadpacket.__name__: (func, flops) for func, flops in seen}
    assert by_name["mm"][1] == 2 * 2 * 3 * 5
    assert sum(flops for func, flops in seen if "attention" in str(func)) == 2 * 2 * 2 * 4 * 4 * 8
    assert torch.Tag.nondeterministic_seeded in by_name["rand"][0].tags
    assert by_name["view"][0].is_view
    assert by_name["mm"][0].namespace == "aten"


def test_leaves_of_arguments_are_found():
    assert private.tree_leaves(((1, [2]), {"x": 3})) == [1, 2, 3]
    assert private.tree_map(str, (1, {"x": 2})) == ("1", {"x": "2"})
