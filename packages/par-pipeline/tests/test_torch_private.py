"""Every underscore API of torch that the package uses, called once: the first test to look at when torch moves."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from par_pipeline import _torch_private as private


def test_nested_values_are_taken_apart_and_put_together():
    value = {"a": [1, torch.ones(2)], "b": None}
    leaves, structure = private.tree_flatten(value)
    assert private.tree_unflatten(leaves, structure) == value
    assert private.tree_leaves((1, [2, (3,)])) == [1, 2, 3]
    assert private.tree_map(lambda leaf: 2 * leaf, (1, [2])) == (2, [4])
    assert private.tree_map_only(int, lambda leaf: -leaf, (1, "a")) == (-1, "a")


def test_a_module_s_own_tables_have_its_parameters_and_the_children_that_come_again():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, layer)
    assert list(private.children_of(model).items()) == [("0", layer), ("1", layer)]
    assert private.buffers_of(layer) == {}
    assert private.unsaved_buffers_of(layer) == set()
    parameters = private.parameters_of(layer)
    stand_in = parameters["weight"] = torch.zeros(2, 2)
    assert layer.weight is stand_in


def test_a_tensor_s_version_grows_with_each_write():
    x = torch.zeros(2)
    before = private.version_of(x)
    x.add_(1)
    assert private.version_of(x) == private.version_of(x.detach()) == before + 1


def test_a_backward_from_edges_adds_to_gradients():
    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    private.run_backward((get_gradient_edge(y),), (torch.ones(3),))
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_hooks_saved_tensors(reentrant):
    seen = []

    def layer(x):
        seen.append(private.are_saved_tensors_hooked())
        return x * x

    checkpoint(layer, torch.ones(1, requires_grad=True), use_reentrant=reentrant)
    assert seen == [not reentrant]  # a reentrant one runs without gradients, and saves nothing
    assert not private.are_saved_tensors_hooked()


def test_hooks_of_a_parameter_are_seen():
    plain, before, after = (nn.Parameter(torch.ones(1)) for _ in range(3))
    before.register_hook(lambda gradient: gradient)
    after.register_post_accumulate_grad_hook(lambda parameter: None)
    assert [private.is_heard(parameter) for parameter in (plain, before, after)] == [False, True, True]
    assert [private.has_tensor_hooks(parameter) for parameter in (plain, before, after)] == [False, True, False]


@pytest.mark.ranks(1)
def test_communicators_are_made_of_the_world_s_store():
    store = dist.distributed_c10d.PrefixStore("test", private.default_store())
    for interfaces in ([], ["lo"]):
        options = private.gloo_options(timedelta(seconds=7), interfaces)
        assert options._timeout == timedelta(seconds=7)
    assert dist.ProcessGroupGloo(store, 0, 1, options).size() == 1


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this build of torch has no NCCL")
def test_nccl_takes_a_timeout():
    assert private.nccl_options(timedelta(seconds=7))._timeout == timedelta(seconds=7)


def test_it_is_known_whether_a_profiler_records():
    assert not private.is_profiled()
    with torch.profiler.profile() as profiler:
        assert private.is_profiled()
        with private.unheard():
            torch.ones(2).exp()
        torch.ones(2).sin()
    assert not private.is_profiled()
    heard = {event.key for event in profiler.key_averages()}
    assert ("aten::exp" in heard, "aten::sin" in heard) == (False, True)
