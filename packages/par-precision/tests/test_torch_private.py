"""torch still has everything private that this package uses, with the meaning that it counts on."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from par_precision import _torch_private as private


def test_many_tensors_in_one_call():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0], dtype=torch.bfloat16)]
    norms = private.foreach_norm(tensors, 2.0, dtype=torch.float64)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(5.0, torch.float64), (1.0, torch.float64)]
    copies = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    private.foreach_copy_(copies, tensors)
    assert [each.tolist() for each in copies] == [[3, 4], [1]]
    private.foreach_mul_(copies, torch.tensor(2.0))
    private.foreach_clamp_min_(copies, 3)
    private.foreach_clamp_max_(copies, 7)
    assert [each.tolist() for each in copies] == [[6, 7], [3]]
    groups = private.grouped_by_device_and_dtype([copies])
    assert {key: [each.tolist() for each in lists[0]] for key, (lists, _) in groups.items()} == {
        (torch.device("cpu"), torch.bfloat16): [[6, 7]],
        (torch.device("cpu"), torch.float32): [[3]],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scalers_kernel_multiplies_with_the_same_bits_as_a_product(dtype):
    one = torch.randn(123, generator=torch.Generator().manual_seed(0)).to(dtype)
    other, by = one.clone(), torch.tensor(1 / 3)
    private.foreach_unscale_([one], torch.zeros(()), by)
    private.foreach_mul_([other], by)
    assert torch.equal(one, other)


@pytest.mark.ranks(2)
def test_the_local_tensor_and_the_placement_of_a_dtensor():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    assert torch.equal(private.local_tensor_of(tensor), tensor.to_local())
    spec = private.spec_of(tensor)
    assert (spec.mesh, tuple(spec.placements)) == (mesh, (Shard(0),))
    assert private.spec_of(tensor) is spec


@pytest.mark.ranks(2)
def test_a_module_knows_that_ddp_runs_it():
    class Asks(nn.Linear):
        def forward(self, x):
            self.inside = private.inside_ddp()
            return super().forward(x)

    module = Asks(2, 2)
    module(torch.ones(1, 2))
    assert not module.inside
    DistributedDataParallel(module)(torch.ones(1, 2))
    assert module.inside
    assert not private.inside_ddp()
    dist.barrier()


def test_a_step_gets_its_hooks_and_loses_them():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    private.bare_step(optimizer)(optimizer)
    assert (parameter.item(), seen) == (0.0, [])
    private.with_step_hooks(lambda _: seen.append("step"))(optimizer)
    assert seen == ["step", "hook"]
    private.note_step(optimizer)
    schedule.step()  # which would warn


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_divides_and_skips_by_itself(fused):
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    assert private.takes_scale(optimizer) is fused
    if fused:
        optimizer.grad_scale = torch.tensor(4.0)
        for found_inf, expected in ((1.0, 1.0), (0.0, 0.75)):
            optimizer.found_inf = torch.tensor(found_inf)
            optimizer.step()
            assert parameter.item() == expected


def test_children_stand_under_each_of_their_names():
    module = nn.Module()
    module.one = module.other = nn.ReLU()
    assert list(private.child_modules(module)) == ["one", "other"]


def test_arguments_are_taken_apart_and_put_together():
    value = ([1, {"x": 2}], (3, None))
    leaves, structure = private.tree_flatten(copy.deepcopy(value))
    assert leaves == [1, 2, 3, None]
    assert private.tree_unflatten(leaves, structure) == value


def test_float8_matrices_are_multiplied_with_their_scales():
    one = torch.full((16, 32), 2.0).to(torch.float8_e4m3fn)
    other = torch.full((16, 32), 3.0).to(torch.float8_e5m2)
    product = private.scaled_mm(one, other.t(), torch.tensor(0.5), torch.tensor(2.0), torch.float32, fast=False)
    assert torch.equal(product, torch.full((16, 16), 6.0 * 32))
