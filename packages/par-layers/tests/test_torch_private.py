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


def test_node_class_of_function_matches_graph():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    node = Twice.apply(torch.ones(1, requires_grad=True)).grad_fn
    assert type(node) is _torch_private.node_class(Twice)


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


def test_a_function_is_called_between_graphs():
    def run(x):
        return _torch_private.apart(lambda y: y if torch.compiler.is_compiling() else y + 1, x * 2)

    assert torch.compile(run, backend="eager")(torch.ones(1)).item() == 3


def test_sums_of_bags_are_those_of_rows_at_their_places():
    rows, places = torch.arange(8.0).view(4, 2), torch.tensor([3, 0, 1, 1])
    sums = _torch_private.sums_of_bags(rows, places, torch.tensor([0, 2]))
    assert sums.tolist() == [[6, 8], [4, 6]]


def test_gradients_of_activations_are_torchs():
    x = torch.linspace(-3, 3, 7, requires_grad=True)
    upstream, written = torch.linspace(1, 2, 7), torch.empty(7)
    _torch_private.silu_backward(upstream, x.detach(), grad_input=written)
    (there,) = torch.autograd.grad(torch.nn.functional.silu(x), x, upstream)
    assert torch.equal(written, there)
    (there,) = torch.autograd.grad(torch.nn.functional.gelu(x), x, upstream)
    assert torch.equal(_torch_private.gelu_backward(upstream, x.detach()), there)


def test_version_of_counts_writes_in_place():
    tensor = torch.ones(2)
    assert _torch_private.version_of(tensor) == 0
    assert _torch_private.version_of(tensor.zero_()) == 1
