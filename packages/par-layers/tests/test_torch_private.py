import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from par_layers import _torch_private


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_counted():
    assert _torch_private.number_of_dispatch_modes() == 0
    with Plain():
        assert _torch_private.number_of_dispatch_modes() == 1


def test_autocast_for_any_device_is_seen():
    assert not _torch_private.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch_private.is_any_autocast_enabled()


def test_an_assertion_without_a_wait_raises_at_once_on_the_cpu():
    _torch_private.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="what is wrong"):
        _torch_private.assert_async(torch.tensor(False), "what is wrong")


@pytest.mark.ranks(2)
def test_every_functional_collective_that_is_used_is_there():
    ops, group, rank = _torch_private.functional_collectives, dist.group.WORLD, dist.get_rank()
    name, x = group.group_name, torch.full((2,), float(rank))

    def done(started):
        return ops.wait_tensor.default(started).tolist()

    assert done(ops.all_reduce.default(x, "sum", name)) == [1, 1]
    assert done(ops.all_gather_into_tensor.default(x, 2, name)) == [0, 0, 1, 1]
    assert done(ops.all_gather_into_tensor_out.default(x, 2, name, out=torch.empty(4))) == [0, 0, 1, 1]
    assert done(ops.reduce_scatter_tensor.default(x, "sum", 2, name)) == [1]
    assert done(ops.all_to_all_single.default(x, [1, 1], [1, 1], name)) == [0, 1]


@pytest.mark.ranks(2)
def test_a_group_is_found_by_its_name():
    assert _torch_private.group_of_name(dist.group.WORLD.group_name) is dist.group.WORLD


def test_a_function_is_left_out_of_graphs():
    @_torch_private.disable_dynamo
    def inside(x):
        assert not torch.compiler.is_compiling()
        return x + 1

    assert torch.compile(lambda x: inside(x) * 2, backend="eager")(torch.ones(1)).item() == 4


def test_a_forward_within_backward_knows_it():
    inside = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: inside.append(_torch_private.current_graph_task()))
    assert _torch_private.current_graph_task() == -1
    x.sum().backward()
    assert inside[0] != -1


def test_hooks_of_saved_tensors_are_seen():
    assert _torch_private.hooks_of_saved_tensors(True) is None
    with torch.autograd.graph.save_on_cpu():
        assert _torch_private.hooks_of_saved_tensors(True) is not None
