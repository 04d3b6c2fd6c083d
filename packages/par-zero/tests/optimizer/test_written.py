"""What is written to an optimizer's tensors after its step reaches all ranks, however it is written."""

import copy
import pickle
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import count_collectives, for_each
from par_zero import shard, summon

from ..helpers import assert_near, batch, copies, joint, loss_of, mlp, policies, sharded, whole

pytestmark = pytest.mark.filterwarnings("ignore:optimizer=.*does not know what this class looks at:UserWarning")


class Free(torch.optim.SGD):
    """Weights y to train with, and x to evaluate with, as a schedule-free optimizer has."""

    def train(self):
        self._move(1.0)

    def eval(self):
        self._move(-0.5)

    @torch.no_grad()
    def _move(self, weight):
        for group in self.param_groups:
            for each in group["params"]:
                each.lerp_(self.state[each]["momentum_buffer"], weight)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def free(parameters):
    return Free(parameters, lr=0.1, momentum=0.9)


class Lookahead:
    """Every second step, moves half way back to where it was; writes by `.data`, as most of its kind do."""

    def __init__(self, optimizer, how):
        self.optimizer, self.how, self.count, self.slow = optimizer, how, 0, {}

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def step(self):
        if not self.slow:
            self.slow = {each: each.detach().clone() for each in self.tensors()}
        self.optimizer.step()
        self.count += 1
        for each in self.tensors() if self.count % 2 == 0 else ():
            slow = self.slow[each]
            slow.add_(each.detach() - slow, alpha=0.5)
            if self.how == "data":
                each.data.copy_(slow)
            elif self.how == "assign":
                each.data = slow.clone()
            else:
                with torch.no_grad():
                    each.copy_(slow)

    def tensors(self):
        return [each for group in self.optimizer.param_groups for each in group["params"]]


def shrink(optimizer, *_):
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.data.mul_(0.9)


WAYS = ("eval", "hook", "copy", "data", "assign")


def trained(module, optimizer, way, rows):
    """Outputs after three steps, with what was written behind them; what follows it is trained on."""
    if way == "hook":
        optimizer.register_step_post_hook(shrink)
    stepping = Lookahead(optimizer, way) if way in {"copy", "data", "assign"} else optimizer
    outputs = []
    for step in range(4):
        loss_of(module, rows(step)).backward()
        stepping.step()
        optimizer.zero_grad()
        if way == "eval":
            optimizer.eval()
        with torch.no_grad():
            outputs.append(module(torch.ones(2, 8, dtype=torch.float64)))
        if way == "eval":
            optimizer.train()
    return outputs


@cache
def trained_by_one_device(way):
    """Outputs of one device on the rows of all ranks."""
    reference = mlp().double()
    optimizer = (free if way == "eval" else sgd)(reference.parameters())
    return trained(reference, optimizer, way, lambda step: joint(step, width=8).double())


@for_each(way=WAYS, stage=(0, 1, 2, 3), copies_in_fp64=(False, True))
@pytest.mark.ranks(2)
def test_writes_after_a_step_reach_every_rank(way, stage, copies_in_fp64):
    """Also where the optimizer holds copies with more digits than the parameters have."""
    make = free if way == "eval" else sgd
    module = mlp().double()
    optimizer = make(module.parameters())
    options = {"param_dtype": torch.float32} if copies_in_fp64 else {}
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, **policies(bucket=300, **options))
    if copies_in_fp64:
        call = module.forward
        module.forward = lambda rows: call(rows.float()).double()
    found = trained(module, optimizer, way, lambda step: batch(step, width=8).double())
    for one, other in zip(
        found, trained_by_one_device(way), strict=True
    ):  # of fp64 sums in another order; or of fp32 weights
        tolerance = 1e-5 if copies_in_fp64 else 1e-9
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def tensors_of(optimizer):
    return [each for group in optimizer.param_groups for each in group["params"]]


@torch.no_grad()
def average_(module, optimizer):
    """An average of weights that takes the place of the weights, as before an evaluation."""
    average = torch.optim.swa_utils.AveragedModel(nn.ParameterList(module.parameters()))
    average.update_parameters(nn.ParameterList(module.parameters()))
    for mine, mean in zip(module.parameters(), average.parameters(), strict=True):
        mine.copy_(mean * 0.5)


def load_optimizer(module, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch._foreach_mul_([each.detach() for each in tensors_of(optimizer)], 0.5)


WRITES = {
    "slice.mul_": lambda _, optimizer: [each.detach().mul_(0.5) for each in tensors_of(optimizer)],
    "slice.data.copy_": lambda _, optimizer: [each.data.copy_(each.data * 0.5) for each in tensors_of(optimizer)],
    "slice foreach": lambda _, optimizer: torch.no_grad()(torch._foreach_mul_)(tensors_of(optimizer), 0.5),
    "slice out=": lambda _, optimizer: [torch.mul(e.detach(), 0.5, out=e.data) for e in tensors_of(optimizer)],
    "load_state_dict of the optimizer": load_optimizer,
    "weight.mul_": lambda module, _: [each.detach().mul_(0.5) for each in module.parameters()],
    "weight.data.copy_": lambda module, _: [each.data.copy_(each.data * 0.5) for each in module.parameters()],
    "weight foreach": lambda module, _: torch.no_grad()(torch._foreach_mul_)(list(module.parameters()), 0.5),
    "weight.clamp_": lambda module, _: [each.data.clamp_(-0.1, 0.1) for each in module.parameters()],
    "load_state_dict": lambda module, _: module.load_state_dict({n: v * 0.5 for n, v in module.state_dict().items()}),
    "average": average_,
}


@pytest.mark.storm
@for_each(write=WRITES)
@pytest.mark.ranks(2, backend="strict")
def test_write_during_all_gather_waits_for_it(write):
    """Write right after a step, and compare what two more steps make of it with stage 0."""
    results = []
    for each in (0, 1, 2):
        module, optimizer = sharded(mlp(), each, sgd)
        for step in range(3):
            loss_of(module, batch(step, width=8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            WRITES[write](module, optimizer)
        results.append(whole(module))
    for result in results[1:]:
        assert_near(result, results[0])


def few(optimizer):
    """A model of one matrix, which one of two ranks has."""
    module = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.1)
    return sharded(module, 1, optimizer, atomic=True)


@for_each(way=("eval", "hook"))
@pytest.mark.ranks(2)
def test_a_rank_without_tensors_takes_part(way):
    module, optimizer = few(free if way == "eval" else sgd)
    if way == "hook":
        optimizer.register_step_post_hook(shrink)
    loss_of(module, torch.ones(2, 4)).backward()
    optimizer.step()
    before = module.weight.detach().clone()
    if way == "eval":
        optimizer.eval()
        assert not torch.equal(module.weight, before)
    every = [torch.empty_like(before) for _ in range(2)]
    dist.all_gather(every, module.weight.detach().clone())
    assert torch.equal(*every)


@pytest.mark.ranks(2)
def test_a_write_that_some_ranks_cannot_see_is_an_error():
    module, optimizer = few(sgd)
    loss_of(module, torch.ones(2, 4)).backward()
    optimizer.step()
    shrink(optimizer)
    if optimizer.param_groups[0]["params"]:
        with pytest.raises(RuntimeError, match=r"the SGD were written after its step.*enter par_zero.summon"):
            module(torch.ones(2, 4))
    with summon(module):
        every = [torch.empty_like(module.weight) for _ in range(2)]
        dist.all_gather(every, module.weight.detach().clone())
    assert torch.equal(*every)
    module(torch.ones(2, 4))


@for_each(stage=(1, 2, 3))
@pytest.mark.ranks(2)
def test_nothing_is_gathered_twice_without_a_write(stage):
    """Nor where somebody reads: a hook that logs a norm, on one rank only."""
    counts = []
    for logs in (False, True):
        module, optimizer = sharded(mlp(), stage, free)
        if logs and dist.get_rank() == 0:
            optimizer.register_step_post_hook(lambda o, *_: [p.data.norm() for p in o.param_groups[0]["params"]])
        with count_collectives() as counted:
            for step in range(2):
                loss_of(module, batch(step, width=8)).backward()
                optimizer.step()
                optimizer.zero_grad()
        counts.append(len(counted.events))
    assert counts[0] == counts[1]


@pytest.mark.ranks(2)
def test_writes_in_summon_and_loads_ask_for_nothing():
    """Of what one rank's share was written, the others do not know; they need not, as parameters are whole."""
    module, _ = sharded(mlp(), 2, sgd, param_dtype=torch.bfloat16)
    with summon(module), torch.no_grad():
        module[0][0].bias.fill_(3.0)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    with count_collectives() as counted:
        module(torch.ones(2, 8, dtype=torch.bfloat16))
    assert not counted.events


@pytest.mark.ranks(2)
def test_tensors_between_steps_are_copied_as_parameters():
    module, optimizer = sharded(mlp(), 2, sgd)
    tensor = optimizer.param_groups[0]["params"][0]
    for made in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert type(made) is nn.Parameter
        assert torch.equal(made, tensor)
    assert isinstance(tensor, nn.Parameter)
    whole(module)
    assert_near({"": made.detach()}, {"": tensor.detach()})
    assert copies(module)
