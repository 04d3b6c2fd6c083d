"""Training in each precision: against one device, against fp32, on plain modules, DTensors and FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from par_groups import kept_tensors, written_
from par_precision import DynamicScale, Float8Linear, MasterWeights, StochasticRounding, mixed, precision_of
from par_testing import default_device_type, for_each, storm

from .training import MAKERS, ON_CPU, adamw, loss_of, model, train

DISTANCE = {"fp32": 0.0, "bf16-amp": 0.02, "bf16": 0.02, "bf16-sr": 0.05, "fp8": 0.1, "fp16-amp": 0.003, "fp16": 0.003}
"""From the fp32 losses: units in the last place of products, of weights, and of float8."""


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("maker", MAKERS)
def test_losses_follow_those_of_fp32(precision, maker):
    reference = model()
    plain = MAKERS[maker](reference)
    expected = []
    for step in range(8):
        loss = loss_of(reference, step)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        expected.append(loss.item())
    module = model()
    losses = train(*mixed(module, MAKERS[maker](module), precision, clip_norm=1.0), steps=8)
    assert losses == pytest.approx(expected, rel=DISTANCE[precision] or 1e-6)  # fp32: the coefficient's last digit
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_buffer_that_its_module_names_keeps_its_dtype_and_bits(precision):
    module = model()
    owner = next(part for part in module.modules() if isinstance(part, nn.Linear))
    owner.register_buffer("choice", torch.tensor([1.0 + 1e-3]))  # between two numbers of bf16
    owner.register_buffer("other", torch.ones(1))
    router = list(module.modules())[-1]  # as transformers' do, it says nothing of the bias of its choice
    router.register_buffer("e_score_correction_bias", torch.tensor([1.0 + 1e-3]))
    bias = router.e_score_correction_bias
    owner.par_keep_dtype = ("choice", "none")
    before = owner.choice
    module, optimizer = mixed(module, adamw(module), precision)
    train(module, optimizer, steps=1)
    assert {id(each) for each in kept_tensors(module, torch.bfloat16).values()} == {id(before), id(bias)}
    assert owner.choice is before
    assert router.e_score_correction_bias is bias
    assert bias.dtype == torch.float32
    assert before.dtype == torch.float32
    assert owner.other.dtype == (precision_of(precision).weights or torch.float32)


@pytest.mark.parametrize("precision", ON_CPU)
def test_dtypes_are_what_each_precision_says(precision):
    module = model()
    module, optimizer = mixed(module, adamw(module), precision, rounding=StochasticRounding(moments=torch.float32))
    train(module, optimizer, steps=1)
    chosen = precision_of(precision)
    assert {p.dtype for p in module.parameters()} == {chosen.weights or torch.float32}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    assert {each.dtype for each in held} == {torch.bfloat16 if chosen.rounded else torch.float32}
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert (held[0] is next(module.parameters())) is not chosen.masters


def test_the_module_returns_fp32_and_takes_inputs_of_any_dtype():
    for precision in ON_CPU:
        module = model()
        module, _ = mixed(module, adamw(module), precision)
        for dtype in (torch.float32, torch.bfloat16) if precision_of(precision).weights else (torch.float32,):
            assert module(torch.zeros(2, 16, dtype=dtype)).dtype == torch.float32
    module = model()
    module, _ = mixed(module, adamw(module), "bf16", output_dtype=None)
    assert module(torch.zeros(2, 16)).dtype == torch.bfloat16


def test_the_users_objects_survive():
    module = model()
    parameters = list(module.parameters())
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    groups = list(optimizer.param_groups)
    same, returned = mixed(module, optimizer, "bf16")
    assert same is module
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert returned.inner is optimizer
    assert isinstance(returned, torch.optim.Optimizer)
    for ours, its in zip(returned.param_groups, groups, strict=True):
        assert ours is its
        assert ours["initial_lr"] == 0.01
    train(module, returned, steps=1)
    scheduler.step()  # made before mixed(), of the user's optimizer
    assert returned.param_groups[0]["lr"] == 0.005


def test_frozen_and_tied_parameters_train_as_ever():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.last.weight = self.first.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.last(self.frozen(self.first(x)).relu())

    module, reference = Tied(), Tied()
    before = module.frozen.weight.clone()
    losses = train(*mixed(module, adamw(module), "bf16"), steps=5)
    assert losses == pytest.approx(train(*mixed(reference, adamw(reference), "fp32"), steps=5), rel=0.02)  # of bf16
    assert torch.equal(module.frozen.weight, before.bfloat16())
    assert module.last.weight is module.first.weight


def test_adagrad_whose_state_begins_before_its_steps_trains():
    losses = []
    for precision in ("bf16", "fp32"):
        module = model()
        losses.append(train(*mixed(module, torch.optim.Adagrad(module.parameters()), precision), steps=4))
    assert losses[0] == pytest.approx(losses[1], rel=DISTANCE["bf16"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("precision", ON_CPU)
def test_frozen_whole_numbers_in_the_optimizer_stay_what_they_are(precision, kind):
    """As quantised weights are."""

    def made(codes):
        module = model()
        if codes is not None:
            module.codes = nn.Parameter(codes, requires_grad=False)  # comes first
        return mixed(module, kind(module.parameters(), lr=0.01), precision, masters=MasterWeights(bucket=2000))

    codes = torch.arange(-3, 3, dtype=torch.int8)
    expected = train(*made(None), steps=6)
    module, optimizer = made(codes.clone())
    assert train(module, optimizer, steps=3) == expected[:3]
    again, its = made(torch.zeros(6, dtype=torch.int8))
    again.load_state_dict(module.state_dict())
    written_(again.parameters())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # whose masters have more digits
    assert train(again, its, steps=3, first=3) == expected[3:]
    for each, its_optimizer in ((module, optimizer), (again, its)):
        assert torch.equal(each.codes, codes)
        assert each.codes.dtype == torch.int8
        assert its_optimizer.param_groups[0]["params"][0] is each.codes
        names = its_optimizer.param_groups[0].get("param_names", ["codes"])
        assert names[0] == "codes"


def test_a_parameter_that_is_thawed_later_trains():
    module = model()
    module[0].requires_grad_(False)
    module, optimizer = mixed(module, adamw(module), "bf16", masters=MasterWeights(accumulate=True))
    before = module[0].weight.clone()
    train(module, optimizer, steps=1)
    assert torch.equal(module[0].weight, before)
    module[0].requires_grad_(True)
    train(module, optimizer, steps=1)
    assert not torch.equal(module[0].weight, before)


def test_a_copy_of_the_module_runs_by_itself():
    for precision in ("bf16", "bf16-amp"):
        module = model()
        module, _ = mixed(module, adamw(module), precision)
        clone = copy.deepcopy(module)
        for each in clone.parameters():
            each.data.zero_()
        assert clone(torch.ones(2, 16)).eq(0).all()
        assert not module(torch.ones(2, 16)).eq(0).all()


@pytest.mark.parametrize("precision", ON_CPU)
def test_an_actor_and_a_critic_share_an_optimizer(precision):
    """As items of a container, called by themselves, in any order, not each in every step."""

    def trained(of):
        both = nn.ModuleDict({"actor": model(0), "others": nn.ModuleList([model(1)])})
        both, optimizer = mixed(both, adamw(both), of, clip_norm=1.0)
        losses = []
        for step, names in enumerate(("ac", "ca", "a", "c", "ac")):
            for name in names:
                loss = loss_of(both["actor"] if name == "a" else both["others"][0], step)
                optimizer.backward(loss)
                losses.append(loss.item())
                assert loss.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert trained(precision) == pytest.approx(trained("fp32"), rel=DISTANCE[precision])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile does it
@pytest.mark.parametrize("precision", [storm("fp32"), storm("bf16"), "fp16-amp", "fp8"])  # by context, by cast
def test_a_module_that_is_compiled_before_its_first_call_trains_and_is_evaluated(precision):
    def trained(*, compiles):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0))  # which asks whether it is training
        module, optimizer = mixed(module, adamw(module), precision, clip_norm=1.0)
        called = torch.compile(module, backend="aot_eager") if compiles else module
        losses = []
        for step in range(2):
            losses += train(called, optimizer, steps=1, first=step)
            module.eval()
            losses.append(loss_of(called, step).item())
            module.train()
        return losses

    assert trained(compiles=True) == pytest.approx(trained(compiles=False), rel=DISTANCE[precision] or 1e-6)


def test_a_forward_that_raises_leaves_no_autocast_behind():
    module = model()
    module, _ = mixed(module, adamw(module), "bf16-amp")
    with pytest.raises(RuntimeError, match="shape"):
        module(torch.ones(2, 3))
    assert not torch.is_autocast_enabled("cpu")
    assert module(torch.ones(2, 16)).dtype == torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_microbatches_are_added_in_fp32(precision):
    """Gradients of 1: half precision stops counting, bf16 at 256 and fp16 at 2048."""
    number = {"bf16": 300, "fp16": 2400}[precision]
    for accumulate in (True, False):
        module = nn.Linear(1, 1, bias=False)
        module, optimizer = mixed(
            module,
            torch.optim.SGD(module.parameters(), lr=0.0),
            precision,
            masters=MasterWeights(accumulate=accumulate),
            scale=1.0,
        )
        for _ in range(number):
            optimizer.backward(module(torch.ones(1, 1)).sum())
        norm = optimizer.step().grad_norm.item()
        assert (norm == number) is accumulate
        optimizer.zero_grad()
        assert optimizer.step().grad_norm == 0


@pytest.mark.parametrize("bucket", [1, 2000, 1 << 28])
def test_buckets_change_nothing(bucket):
    reference, module = model(), model()
    expected = train(*mixed(reference, adamw(reference), "bf16"), steps=4)
    assert train(*mixed(module, adamw(module), "bf16", masters=MasterWeights(bucket=bucket)), steps=4) == expected


def sharded(how, mesh):
    """A model whose parameters are DTensors, and maybe one that is not."""
    module = model()
    if how == "tensor parallel":
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif how == "sequence parallel":
        cut, whole = Shard(0), Replicate()
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(output_layouts=cut),
            "3": SequenceParallel(sequence_dim=0),  # whose gradients are sums that are still to be made
            "": PrepareModuleOutput(output_layouts=cut, desired_output_layouts=whole),
        }
        parallelize_module(module, mesh, plan)
    else:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(module[2], mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@pytest.mark.ranks(2)
@for_each(how=["tensor parallel", "sequence parallel", "FSDP2"])
def test_models_of_dtensors_train_as_on_one_device(how):
    mesh = init_device_mesh(default_device_type(), (2,))
    fused_or_not = [("fp32", True), ("bf16", False), ("bf16-amp", True), ("fp16", True)]
    for precision, fused in [*fused_or_not, ("bf16-sr", True), ("bf16-sr", False)]:
        module, reference = sharded(how, mesh), model()
        plain = [p for p in module.parameters() if not hasattr(p, "placements")]
        if plain and not precision_of(precision).masters:
            continue  # torch's own optimizers refuse a mix; masters are never DTensors
        world = {"group": dist.group.WORLD, "replicas": dist.group.WORLD}
        found = losses_and_norms(*mixed(module, adamw(module, fused=fused), precision, clip_norm=1.0, **world))
        expected = losses_and_norms(*mixed(reference, adamw(reference, fused=fused), precision, clip_norm=1.0))
        distance = 1e-5 if precision == "fp32" else DISTANCE[precision]
        assert found == pytest.approx(expected, rel=distance), (precision, fused)


def losses_and_norms(module, optimizer):
    """Of three steps. In the norm a gradient that is a sum still to be made shows at once, in the loss late."""
    found = []
    for step in range(3):
        found += [*train(module, optimizer, steps=1, first=step), optimizer.last.grad_norm.item()]
    return found


def test_mixed_unknown_keyword_is_refused_and_a_scale_is_kept():
    module = model()
    with pytest.raises(TypeError, match="clip_nrom"):
        mixed(module, adamw(module), "fp32", clip_nrom=1.0)
    _, optimizer = mixed(module, adamw(module), "fp16-amp", scale=DynamicScale(init=4.0))
    assert optimizer.scaling.scale.value == 4


class Router(nn.Module):
    """Keeps its weight in fp32, as routers of Hugging Face Transformers do."""

    par_keep_dtype = ("weight",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, given):
        assert self.weight.dtype == torch.float32
        return given * (given.float() @ self.weight).softmax(-1).to(given.dtype)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-sr", "fp8"])
def test_mixed_parameter_that_is_kept_trains_in_fp32(precision, accumulate):
    if precision == "bf16-sr" and accumulate:
        pytest.skip("it has no master weights")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8), Router())
    given, expected = torch.randn(4, 8), copy.deepcopy(module)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    masters = MasterWeights(accumulate=True) if accumulate else MasterWeights()
    kept = module[3].weight
    module, optimizer = mixed(module, torch.optim.SGD(module.parameters(), lr=0.1), precision, masters=masters)
    for _ in range(3):
        optimizer.backward(module(given).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        expected(given).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert module[3].weight is kept
    assert kept.dtype == torch.float32
    assert not torch.equal(kept, kept.bfloat16().float())  # it has digits that bf16 has not
    torch.testing.assert_close(kept, expected[3].weight, rtol=0, atol=2e-3)  # gradients are of half-precision products
    module.state_dict()


def test_fp8_leaves_a_linear_alone_whose_weight_is_kept():
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    module[1].par_keep_dtype = ("weight",)
    module, _ = mixed(module, adamw(module), "fp8")
    assert [isinstance(each, Float8Linear) for each in module] == [True, False]


@pytest.mark.ranks(2)
def test_mixed_kept_parameter_in_a_unit_of_fsdp2_raises_by_name():
    mesh = init_device_mesh(default_device_type(), (2,))
    module = nn.Sequential(nn.Linear(8, 8), Router())
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'1.weight' stays in fp32, as its model declares, and FSDP2 gathers it with"):
        mixed(module, optimizer, "bf16", group=dist.group.WORLD)
    assert module[0].weight.dtype == torch.float32
    module = nn.Sequential(nn.Linear(8, 8), Router())
    fully_shard(module[1], mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = mixed(module, optimizer, "bf16", group=dist.group.WORLD)
    optimizer.backward(module(torch.ones(2, 8)).sum())
    optimizer.step()
    assert [parameter.dtype for parameter in module.parameters()] == [torch.bfloat16, torch.bfloat16, torch.float32]
