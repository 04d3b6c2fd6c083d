"""Freed parameters of stage 3: right, or an error that names the parameter, wherever a program reads them."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict

from par_groups import part_of
from par_testing import for_each
from par_zero import reset, shard, summon

from .helpers import assert_near, assert_same, batch, copies, joint, loss_of, mlp, sgd, sharded, train, whole

OUTSIDE = "outside of a call of its module"


class Heads(nn.Module):
    """One share of a head's weight is as long as its rows, for two ranks, so it would broadcast."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 2, bias=False)})
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        for layer in self.body:
            x = layer(x).tanh()
        return nn.functional.linear(x, self.heads["a"].weight)

    def score(self, x):
        return self.body[0](x) + self.shift


def heads():
    torch.manual_seed(0)
    return Heads()


def average(module):
    """An average of weights, as torch's own for an EMA makes it."""
    mean = torch.optim.swa_utils.AveragedModel(heads(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    mean.update_parameters(module)


READERS = {
    "a forward that reads another module's": (lambda m: m(torch.ones(2, 16)), "heads.a.weight"),
    "a method": (lambda m: m.score(torch.ones(2, 16)), "shift"),
    "a penalty": (lambda m: sum(p.square().sum() for p in m.parameters()), "shift"),
    "an average": (average, "shift"),
    "a list of tensors": (lambda m: torch._foreach_norm(list(m.heads.parameters())), "heads.a.weight"),
    "an item": (lambda m: m.heads["a"].weight[0], "heads.a.weight"),
    "data": (lambda m: m.heads["a"].weight.data.sum(), "heads.a.weight"),
    "an initialiser": (lambda m: nn.init.zeros_(m.heads["a"].weight), "heads.a.weight"),
    "an assignment to data": (lambda m: setattr(m.shift, "data", torch.ones(16)), "shift"),
    "another parameter": (lambda m: torch.ones(2, 16).copy_(m.heads["a"].weight), "heads.a.weight"),
    # safetensors writes as many bytes from there as the shape has, which would go past the shard.
    "an address": (lambda m: m.heads["a"].weight.data_ptr(), "heads.a.weight"),
    "a copy": (lambda m: copy.deepcopy(m.heads), "heads.a.weight"),
    "a move": (lambda m: m.to(torch.float64), "body.0.weight"),
}


@for_each(reader=tuple(READERS))
@pytest.mark.ranks(2)
def test_a_read_of_a_freed_parameter_raises_by_name(reader):
    read, name = READERS[reader]
    module, _ = sharded(heads(), 3, sgd, bucket=1)
    with pytest.raises(RuntimeError, match=rf"'{name}' .* {OUTSIDE}.*summon"):
        read(module)
    reset(module)
    with summon(module):
        read(module) if reader not in ("a copy", "a move", "an assignment to data") else None


@pytest.mark.ranks(2)
def test_a_freed_parameter_has_the_shape_of_the_whole():
    module, reference = sharded(heads(), 3, sgd, bucket=1)[0], heads()
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert isinstance(one, nn.Parameter)
        for notes in ("shape", "ndim", "dtype", "device", "nbytes", "requires_grad", "is_leaf"):
            assert getattr(one, notes) == getattr(other, notes), notes
        for ask in ("size", "numel", "nelement", "dim", "stride", "element_size", "is_contiguous", "__len__"):
            assert getattr(one, ask)() == getattr(other, ask)(), ask
        assert (one.size(-1), one.stride(0)) == (other.size(-1), other.stride(0))
        assert torch.ones(2, dtype=torch.float64).to(one).dtype == torch.float32
        assert part_of(one).ndim == 1
    assert "heads.a.weight" in repr(module.heads["a"].weight)
    module.to(torch.float32)  # changes nothing
    module.requires_grad_(True)
    assert sum(part_of(each).numel() for each in module.parameters()) < sum(p.numel() for p in module.parameters())


@pytest.mark.ranks(2)
def test_torchs_checkpoint_saves_and_loads_the_parts_of_all_ranks(tmp_path):
    path = tmp_path / "dcp"
    module, optimizer = sharded(mlp(), 3, sgd)
    train(module, optimizer, [[batch(0, width=8)]])
    wanted = whole(module)
    dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=path)
    train(module, optimizer, [[batch(1, width=8)]])
    state = {"model": get_model_state_dict(module)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(module, state["model"])
    assert_same(whole(module), wanted)
    plain = mlp(seed=1).state_dict()  # an ordinary model reads the same files
    dcp.load({"model": plain}, checkpoint_id=path)
    assert_same(plain, wanted)


@for_each(dtype=(None, torch.bfloat16))
@pytest.mark.ranks(2)
def test_a_state_dict_is_kept_and_loaded_outside_of_summon(dtype):
    module, optimizer = sharded(mlp(), 3, sgd, param_dtype=dtype)
    before = whole(module)
    kept = {name: value.clone() for name, value in module.state_dict().items()}  # as for the best epoch
    also = copy.deepcopy(module.state_dict())
    full = {name: value.float() for name, value in whole(module).items()}
    for state in (kept, also, full):
        loss_of(module, batch(1, width=8).to(dtype or torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        module.load_state_dict(state)
        assert_same(whole(module), before)
    with pytest.raises(RuntimeError, match=r"'0.0.weight' is pickled or saved outside of summon"):
        torch.save(module.state_dict(), io.BytesIO())
    with summon(module):
        torch.save(module.state_dict(), io.BytesIO())


def penalised(module, data, *, keeps):
    """A penalty, and a forward behind it; the penalty's graph leads into that of an output that may be gone."""
    x = data.clone().requires_grad_()
    output = module(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    main = output.mean() if keeps else 0
    del output
    return main + module(data.flip(0)).square().mean() + (slope.norm(dim=1) - 1).square().mean()


@for_each(stage=(2, 3), keeps=(True, False))
@pytest.mark.ranks(2)
def test_a_gradient_penalty_goes_with_a_forward_behind_it(stage, keeps):
    module, optimizer = sharded(mlp(), stage, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    for step in range(2):
        penalised(module, batch(step, width=8), keeps=keeps).backward()
        losses = [penalised(reference, batch(step, rank, width=8), keeps=keeps) for rank in range(2)]
        (sum(losses) / 2).backward()
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    assert_near(whole(module), copies(reference))


TRANSFORMS = {
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "grad": lambda m, x: torch.func.grad(lambda z: m(z).sum())(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x),
}


@for_each(transform=tuple(TRANSFORMS))
@pytest.mark.ranks(2)
def test_a_transform_of_torch_func_raises_or_runs_within_summon(transform):
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
    module, optimizer = sharded(mlp(), 3, sgd)
    reference = mlp()
    its = sgd(reference.parameters())
    data = batch(0, width=8)
    with pytest.raises(RuntimeError, match=r"transform of torch\.func.*stage=2.*summon"):
        TRANSFORMS[transform](module, data)
    reset(module)
    with summon(module):
        found = TRANSFORMS[transform](module, data)
        loss = found.square().mean()
        loss.backward()
    optimizer.step()
    wanted = TRANSFORMS[transform](reference, joint(0, width=8))
    torch.testing.assert_close(found, wanted.chunk(2)[dist.get_rank()])  # products of more rows are rounded otherwise
    wanted.square().mean().backward()
    its.step()
    assert_near(whole(module), copies(reference))


class Routed(nn.Module):
    """A block that leaves a loss in an attribute, computed behind what it returns."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.router, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.losses = {}

    def forward(self, x):
        out = x + self.linear(x).tanh()
        loss = self.router(x).square().mean()
        if self.kind == "attribute":
            self.loss = loss
        elif self.kind == "list":
            self.losses = [loss, None]
        else:
            self.losses["router"] = loss
        return out

    def get(self):
        return {"attribute": lambda: self.loss, "list": lambda: self.losses[0]}.get(
            self.kind, lambda: self.losses["router"]
        )()


@for_each(kind=("attribute", "list", "dict"), alone=(False, True))
@pytest.mark.ranks(2)
def test_a_loss_in_an_attribute_goes_backward_by_itself(kind, alone):
    def made():
        torch.manual_seed(0)
        blocks = nn.ModuleList([Routed(kind) for _ in range(3)])
        return nn.Sequential(*blocks, nn.Linear(8, 8))

    def loss(module, data):
        main = module(data).square().mean()
        routers = sum(block.get() for block in module[:3])
        if alone:  # a pass of its own, in which no unit has a gradient of what it returned
            main.backward(retain_graph=True)
            return routers
        return main + routers

    module, optimizer = sharded(made(), 3, sgd, bucket=1)
    reference = made()
    its = sgd(reference.parameters())
    for step in range(4):
        loss(module, batch(step, width=8)).backward()
        loss(reference, joint(step, width=8)).backward()
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    assert_near(whole(module), copies(reference))


@pytest.mark.ranks(2)
def test_a_compiled_module_is_known_as_sharded():
    warnings.simplefilter("ignore", UserWarning)  # torch's own, of gradients that it looks for in compiled code
    for compiled_first in (True, False):
        module = mlp()
        optimizer = sgd(module.parameters())
        torch.compiler.reset()
        compiled = torch.compile(module, backend="aot_eager")
        shard(
            compiled if compiled_first else module, optimizer, stage=3, group=dist.group.WORLD, overlap={"bucket": 300}
        )
        loss_of(compiled, batch(0, width=8)).backward()
        optimizer.step()
        with summon(compiled):
            assert compiled._orig_mod[0][0].weight.shape == (16, 8)
        reset(compiled)


@pytest.mark.cpu(reason="sparse tensors")
@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused_by_name():
    table = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"'0' has sparse=True.*set sparse=False"):
        sharded(table, 1, sgd)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10, 8))

        def forward(self, index):
            return nn.functional.embedding(index, self.weight, sparse=True)

    module, _ = sharded(Own(), 1, sgd)
    with pytest.raises(RuntimeError, match=r"the gradient of 'weight' is sparse"):
        module(torch.arange(4)).sum().backward()


@pytest.mark.ranks(2)
def test_a_step_within_summon_is_refused_before_it():
    module, optimizer = sharded(mlp(), 3, sgd)
    loss_of(module, batch(0, width=8)).backward()
    before = whole(module)
    with summon(module), pytest.raises(RuntimeError, match=r"leave par_zero.summon\(module\) before the step"):
        optimizer.step()
    assert_same(whole(module), before)


@for_each(stage=(0, 1, 3))
@pytest.mark.ranks(2)
def test_torchs_state_of_an_optimizer_by_name_is_refused(stage):
    module, optimizer = sharded(mlp(), stage)
    rates = [group["lr"] for group in optimizer.param_groups]
    before = whole(module)
    for trained in (False, True):
        with pytest.raises(ValueError, match=r"look for the tensors of the AdamW.*par_checkpoint.save"):
            get_optimizer_state_dict(module, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        if not trained:
            assert_same(whole(module), before)
            train(module, optimizer, [[batch(0, width=8)]])
    assert optimizer.state_dict()["state"]
