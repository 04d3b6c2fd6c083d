"""fp32 masters: how their gradients become fp32, and what is seen of them in between."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from par_groups import set_sharding, whole, written_
from par_precision import MasterWeights, mixed

SHAPES = [(15, 17), (123,), (15, 17), (), (0,), (17, 15), (123,), (2, 3, 4)]


def parameters(dtype=torch.float32):
    """Of several shapes, some of them alike; one is laid out by columns."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[2] = nn.Parameter(made[2].detach().t().contiguous().t())
    return nn.ParameterList(made)


def give_gradients(module, seed):
    """Numbers that fp16 holds, by rows where an fp16 parameter is by columns: fused kernels are blind to layouts."""
    generator = torch.Generator().manual_seed(seed)
    for each in module:
        given = torch.randn(each.shape, generator=generator).half()
        each.grad = given if each.dtype == torch.float16 else torch.empty_like(each).copy_(given)


def reference(optimizer_type, **keywords):
    """The same steps in fp32."""
    module = parameters()
    inner = optimizer_type(module.parameters(), lr=0.1, **keywords)
    for step in range(3):
        give_gradients(module, step)
        inner.step()
    return module


def test_sums_of_a_skipped_step_do_not_spoil_the_next():
    module = nn.Linear(3, 3)
    module, optimizer = mixed(
        module, torch.optim.AdamW(module.parameters(), foreach=True), "bf16", masters=MasterWeights(accumulate=True)
    )
    given = torch.ones(2, 3, dtype=torch.bfloat16)
    optimizer.backward(module(given).sum() * math.inf)
    assert optimizer.step().skipped
    module.zero_grad()  # the parameters' alone
    optimizer.backward(module(given).sum())
    assert not optimizer.step().skipped


def test_copies_of_the_optimizer_are_refused_in_a_sentence():
    module = nn.Linear(3, 3)
    _, optimizer = mixed(module, torch.optim.AdamW(module.parameters()), "bf16")
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a mixed AdamW cannot be copied, nor pickled: .* save state_dict\(\)"):
            make(optimizer)


@pytest.mark.parametrize("bucket", [1, 4 * 300, 1 << 28])
@pytest.mark.parametrize(
    ("optimizer_type", "keywords"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.5}),
    ],
)
def test_masters_step_as_fp32_parameters_do_whatever_their_shapes_layouts_and_buckets(bucket, optimizer_type, keywords):
    module = parameters()
    inner = optimizer_type(module.parameters(), lr=0.1, **keywords)
    module, optimizer = mixed(module, inner, "fp16", scale=1.0, masters=MasterWeights(bucket=bucket))
    for step in range(3):
        give_gradients(module, step)
        optimizer.step()
    for master, parameter, expected in zip(
        inner.param_groups[0]["params"], module, reference(optimizer_type, **keywords), strict=True
    ):
        assert master.stride() == expected.stride()
        # not exact: where memory is aligned otherwise, fused kernels take other elements one by one
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter, master.half())


@pytest.mark.parametrize("bucket", [1, 1 << 28])
def test_a_parameter_whose_gradient_was_dropped_is_not_stepped(bucket):
    module = parameters()
    inner = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)
    module, optimizer = mixed(module, inner, "fp16", scale=1.0, masters=MasterWeights(bucket=bucket))
    optimizer.backward(sum(each.float().square().sum() for each in module))
    before = [each.detach().clone() for each in module]
    module[0].grad = None  # the master of it showed the gradient
    optimizer.step()
    assert [torch.equal(each, old) for each, old in zip(module, before, strict=True)] == [
        each is module[0] or each.numel() == 0 for each in module
    ]


@pytest.mark.parametrize("bucket", [1, 1 << 28])
def test_no_fp32_gradient_outlives_a_step_or_what_follows_a_skipped_one(bucket):
    module = parameters()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = mixed(module, inner, "fp16", scale=1.0, masters=MasterWeights(bucket=bucket))
    masters = inner.param_groups[0]["params"]
    give_gradients(module, 0)
    optimizer.step()
    assert all(each.grad is None for each in masters)
    give_gradients(module, 1)
    module[1].grad[5] = torch.inf
    assert optimizer.step().skipped
    optimizer.zero_grad()
    assert all(each.grad is None for each in masters)


@pytest.mark.ranks(2)
def test_of_masters_of_one_shape_each_is_counted_by_its_own_rule():
    """One is this rank's alone, the other is held by both."""
    for bucket in (1, 1 << 28):
        module = nn.ParameterList([nn.Parameter(torch.zeros(15, 17)) for _ in range(2)])
        set_sharding(module[1], whole((15, 17), (0, 1)))
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        module, optimizer = mixed(
            module, inner, "fp16", group=dist.group.WORLD, scale=1.0, masters=MasterWeights(bucket=bucket)
        )
        module[1].grad = torch.full((15, 17), 2.0, dtype=torch.float16)
        module[0].grad = torch.full((15, 17), 3.0 + dist.get_rank(), dtype=torch.float16)
        squares = 15 * 17 * (2**2 + 3**2 + 4**2)
        assert optimizer.step().grad_norm.item() == pytest.approx(squares**0.5, rel=1e-14)  # fp64


def test_a_module_that_is_saved_leaves_its_masters_behind_and_works_without():
    module = nn.Linear(256, 256)
    module, _ = mixed(module, torch.optim.AdamW(module.parameters()), "bf16")
    file = io.BytesIO()
    torch.save(module, file)
    assert file.tell() < 1.5 * sum(each.nbytes for each in module.parameters())  # fp32 masters would make it 3 times
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    given = torch.ones(2, 256)
    assert torch.equal(loaded(given), module(given))
    written_(loaded.parameters())


WRITES = {
    "load_state_dict": lambda m: m.load_state_dict({k: torch.full_like(v, 0.25) for k, v in m.state_dict().items()}),
    "no_grad": lambda m: [p.fill_(0.25) for p in m.parameters()],
    "data": lambda m: [p.data.fill_(0.25) for p in m.parameters()],
    "detach": lambda m: [p.detach().fill_(0.25) for p in m.parameters()],
    "an assignment to data": lambda m: [setattr(p, "data", torch.full_like(p, 0.25)) for p in m.parameters()],
    "a vector": lambda m: nn.utils.vector_to_parameters(
        torch.full((sum(p.numel() for p in m.parameters()),), 0.25, dtype=torch.bfloat16), m.parameters()
    ),
}


@pytest.mark.parametrize("bucket", [1, 1 << 28])
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_after_mixed_are_what_is_stepped(write, bucket):
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    inner = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0)
    module, optimizer = mixed(module, inner, "bf16", masters=MasterWeights(bucket=bucket))
    for _ in range(2):
        with torch.no_grad():
            WRITES[write](module)
        for master in optimizer.state_dict()["par_precision"]["masters"]:  # what would be saved now
            torch.testing.assert_close(master, torch.full_like(master, 0.25), rtol=0, atol=2**-10)  # rounds to it
        optimizer.backward(module(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        for parameter in module.parameters():  # a step of AdamW is lr, and a rounding in bf16 2 ** -9 of 0.25
            torch.testing.assert_close(parameter.float(), torch.full(parameter.shape, 0.25), rtol=0, atol=2e-3)


def test_an_alias_that_is_kept_is_followed_element_by_element():
    module = nn.Linear(4, 4, bias=False)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=1e-3), "bf16")
    (master,) = optimizer.inner.param_groups[0]["params"]
    alias = module.weight.data
    for row in range(3):
        alias[row] = 0.5
        before = master.detach().clone()
        optimizer.backward(module(torch.zeros(2, 4)).sum())  # gradients of zero
        optimizer.step()
        assert bool((master[row] == 0.5).all())
        assert torch.equal(master[row + 1 :], before[row + 1 :])  # with all their digits


def test_a_parameter_replaced_by_a_load_raises_by_name():
    module, optimizer = mixed(module := nn.Sequential(nn.Linear(4, 4)), torch.optim.SGD(module.parameters()), "bf16")
    with pytest.raises(RuntimeError, match=r"'0.weight' was replaced by load_state_dict\(assign=True\)"):
        module.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict(), assign=True)
    assert optimizer is not None


def test_torchs_state_by_name_is_refused_where_masters_are_stepped():
    module, optimizer = mixed(module := nn.Linear(4, 4), torch.optim.AdamW(module.parameters()), "bf16")
    optimizer.backward(module(torch.ones(2, 4)).sum())
    optimizer.step()
    with pytest.raises(ValueError, match=r"look for the tensors of the AdamW among .* use par_checkpoint.save"):
        get_optimizer_state_dict(module, optimizer)
    assert optimizer.state_dict()["state"]


def test_set_optimizer_state_dict_of_masters_raises_before_changes():
    """Also of an optimizer that has not stepped, whose rates torch sets to 0 while it makes a step."""
    whole = nn.Linear(4, 4)
    given = get_optimizer_state_dict(whole, torch.optim.AdamW(whole.parameters()))
    module, optimizer = mixed(module := nn.Linear(4, 4), torch.optim.AdamW(module.parameters(), lr=0.1), "bf16")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"look for the tensors of the AdamW among .* use par_checkpoint.save"):
            set_optimizer_state_dict(module, optimizer, given)
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.backward(module(torch.ones(2, 4)).sum())
        optimizer.step()
    own, plain = mixed(own := nn.Linear(4, 4), torch.optim.AdamW(own.parameters()), "fp32")
    set_optimizer_state_dict(own, plain, given)
    assert plain.state[own.weight]["step"] == 1


def halve_in_place(tensor):
    tensor.detach().mul_(0.5)


def halve_through_data(tensor):
    tensor.data.mul_(0.5)


def halve_by_assignment(tensor):
    tensor.data = tensor.data * 0.5


class Lookahead:
    """Slow weights around an optimizer, as pytorch_optimizer and timm have them: every second step is halved."""

    def __init__(self, optimizer, halve):
        self.optimizer, self.halve, self.steps = optimizer, halve, 0

    def step(self):
        self.optimizer.step()
        self.steps += 1
        for group in self.optimizer.param_groups if self.steps % 2 == 0 else ():
            for tensor in group["params"]:
                self.halve(tensor)


@pytest.mark.parametrize("then", ["forward", "state_dict", "masters", "compiled"])
@pytest.mark.parametrize("halve", [halve_in_place, halve_through_data, halve_by_assignment])
def test_mixed_masters_written_after_a_step_reach_the_module(halve, then):
    module = nn.Linear(8, 8)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.5), "bf16")
    call = torch.compile(module, backend="eager", fullgraph=True) if then == "compiled" else module
    lookahead = Lookahead(optimizer, halve)
    for _ in range(4):
        call(torch.ones(2, 8)).square().mean().backward()
        lookahead.step()
        optimizer.zero_grad() if then == "compiled" else module.zero_grad()
    masters = optimizer.param_groups[0]["params"]
    if then == "state_dict":
        module.state_dict()
    elif then == "masters":
        optimizer.state_dict()
    else:
        call(torch.ones(2, 8))
    for master, parameter in zip(masters, module.parameters(), strict=True):
        assert torch.equal(parameter, master.bfloat16())


def test_masters_and_parameters_both_written_raise_by_name():
    module = nn.Linear(8, 8)
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.5), "bf16")
    halve_in_place(optimizer.param_groups[0]["params"][1])
    halve_in_place(module.bias)
    with pytest.raises(RuntimeError, match=r"'bias' was written in the module, and master weights in the SGD"):
        module(torch.ones(2, 8))


def drop_all(module):
    for parameter in module.parameters():
        parameter.grad = None


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("drop", [drop_all, nn.Module.zero_grad])
@pytest.mark.parametrize("after", ["backward", "forward"])
def test_accumulated_sums_dropped_by_the_program_do_not_count(drop, after, unseen):
    given = torch.eye(4)

    def stepped(**options):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.1), "bf16", **options)
        module(given).sum().backward()  # of a bad batch
        if after == "backward":
            drop(module)
        output = module(2 * given)
        if after == "forward":
            drop(module)
        output.square().sum().backward()
        output = module[1](module[0](3 * given.bfloat16())) if unseen else module(3 * given)
        output.square().sum().backward()
        module[1].bias.grad = None
        optimizer.step()
        return [master.detach() for master in optimizer.param_groups[0]["params"]]

    # The sums differ by the rounding of bf16 gradients, which plain bf16 gradients add up with.
    torch.testing.assert_close(
        stepped(masters=MasterWeights(accumulate=True)), stepped(masters=MasterWeights()), rtol=0.02, atol=0.02
    )


def test_accumulated_gradient_read_in_the_module_raises():
    module = nn.Linear(4, 4)
    module, optimizer = mixed(
        module, torch.optim.SGD(module.parameters(), lr=0.1), "bf16", masters=MasterWeights(accumulate=True)
    )
    module(torch.eye(4)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"the gradient of 'weight' is read or written .* the optimizer's fp32 master"
    ):
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    module.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)  # in place of the sum, as on any parameter
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.param_groups[0]["params"][0].detach(), before - 0.1)
    assert module.weight.grad is None


def test_state_that_was_read_by_the_modules_parameters_can_be_saved():
    module = parameters(torch.bfloat16)
    _, optimizer = mixed(module, torch.optim.AdamW(module.parameters(), lr=0.1), "bf16")
    give_gradients(module, 0)
    optimizer.step()
    assert [dict(optimizer.state[each]) for each in module] == [{}] * len(SHAPES)
    assert len(optimizer.state_dict()["state"]) == len(SHAPES)
