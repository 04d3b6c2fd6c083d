"""Modules of one's own, cut in place; transformers is not needed."""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from par_groups import ProcessGroups, Topology, check_owned, sharding_of
from par_layers import (
    ColumnParallel,
    EmbeddingParallel,
    PartialGradient,
    PartialGradientReducer,
    layer_set,
    parallelization_of,
    parallelize,
    plan_shardings,
    verify_plan,
)
from par_testing import assert_equal_to_one_device, limited_backend, storm

from ..helpers import numbers
from .helpers import Mlp, close, live

PAIR = {"up": "colwise", "down": "rowwise"}
REASON = "fp64 sums in another order"


class Attention(nn.Module):
    """Heads with a norm of keys, and an MLP in the residual stream behind; it knows nothing of ranks."""

    def __init__(self, width=16, heads=4, key_heads=2):
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = width // heads, heads, key_heads
        self.num_key_value_groups = heads // key_heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, key_heads * self.head_dim)
        self.v = nn.Linear(width, key_heads * self.head_dim)
        self.norm = nn.LayerNorm(self.head_dim)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (self.norm(k), v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, 24)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """13 ids, which divide by neither 2 nor 4."""

    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(13, 16, padding_idx=11)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 13, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "table": "embedding_rowwise",
    **{f"layers.*.attention.{name}": "colwise" for name in "qkv"},
    "layers.*.attention.norm": PartialGradient(),
    "layers.*.attention.o": "rowwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": ColumnParallel(gather=True),
}
IDS = torch.tensor([[1, 12, 3, 0, 5, 6, 7, 11], [8, 9, 10, 11, 12, 0, 1, 2]])


def make(*arguments, kind=Model):
    torch.manual_seed(0)
    return kind(*arguments).double()


def both(groups, plan=None, *, kind=Model, **options):
    """The model whole, and cut."""
    whole, cut = make(kind=kind), make(kind=kind)
    parallelize(cut, groups, plan or PLAN, **options)
    return whole, cut


def assert_gradients_equal(whole, cut, x, groups):
    """Of two backwards, and the outputs of both."""
    for power in (2, 3):
        expected, here = whole(x), cut(x)
        close(here, expected)
        expected.pow(power).sum().backward()
        here.pow(power).sum().backward()
    PartialGradientReducer(cut, groups).handle_gradient()
    assert_equal_to_one_device(cut, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=REASON)


@pytest.mark.ranks([storm(2), 4])
def test_a_model_of_ones_own_equals_one_device():
    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups:
            for tied in (False, True):
                whole, cut = make(tied), make(tied)
                before = dict(cut.named_parameters())
                optimizer = torch.optim.SGD(cut.parameters(), lr=0.1)  # made before: parameters are the same objects
                parallelize(cut, groups, PLAN)
                assert all(parameter is before[name] for name, parameter in cut.named_parameters())
                check_owned((name, sharding_of(parameter)) for name, parameter in cut.named_parameters())
                told = plan_shardings(make(tied), groups.topology, groups.global_rank, PLAN)
                assert told == {name: sharding_of(parameter) for name, parameter in cut.named_parameters()}
                assert_gradients_equal(whole, cut, IDS, groups)
                torch.optim.SGD(whole.parameters(), lr=0.1).step()
                optimizer.step()
                assert_equal_to_one_device(cut, whole, rtol=1e-10, atol=1e-10, reason=REASON)
                with torch.no_grad():  # nothing is cut along the sequence then, so that any length goes
                    close(cut.eval()(IDS[:, :5]), whole(IDS[:, :5]))


@pytest.mark.ranks(2)
def test_the_input_has_its_gradient_and_other_shapes_go_too():
    with live() as groups:
        whole, cut = both(groups, PAIR, kind=Mlp)
        for shape in ((8,), (3, 8), (2, 3, 5, 8)):
            mine, other = numbers(*shape).requires_grad_(), numbers(*shape).requires_grad_()
            cut(mine).pow(2).sum().backward()
            whole(other).pow(2).sum().backward()
            close(mine.grad, other.grad)


class Residual(nn.Module):
    """An MLP that adds its input itself."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x) * self.gate(x))


class Chain(Residual):
    """What a Row gives goes to a Column."""

    def forward(self, x):
        return self.up(self.down(self.up(x) * self.gate(x)))


class Given(nn.Module):
    """An MLP that is given what it adds."""

    def __init__(self):
        super().__init__()
        self.inner = GivenInner()

    def forward(self, x):
        return self.inner(x.tanh(), residual=x)


class GivenInner(Residual):
    def forward(self, x, residual):
        return residual + self.down(self.up(x) * self.gate(x))


class Beside(Residual):
    """A factor that is made of the input goes into the Row too; its norm makes it an open region."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)) * self.gate(x) * x.mean(-1, keepdim=True))


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


GATED = {"inner.up": "colwise", "inner.gate": "colwise", "inner.down": "rowwise"}


@pytest.mark.ranks(2)
def test_a_module_that_is_no_region_is_found_out():
    with live() as groups:
        for kind, what in ((Residual, "adds an input to its output"), (Chain, "hands the output of its Row to a Col")):
            wrong = parallelize(Around(make(kind=kind)), groups, GATED)
            with pytest.raises(ValueError, match=f"'inner' {what}.*'inner' itself the rule 'replicate'"):
                wrong(numbers(3, 8).requires_grad_())
        with pytest.raises(ValueError, match=r"'inner' adds an input to its output.*the rule 'replicate'"):
            parallelize(make(kind=Given), groups, GATED)(numbers(3, 8).requires_grad_())
        whole, cut = both(groups, {**GATED, "inner": "replicate"}, kind=Given)
        assert_gradients_equal(whole, cut, numbers(3, 8), groups)
        without = {name: style for name, style in PLAN.items() if "attention.norm" not in name}
        with pytest.raises(
            ValueError, match=r"'layers.0.attention.norm.weight' is used between .* the rule PartialGradient\(\)"
        ):
            both(groups, without)[1](IDS)
        with pytest.raises(ValueError, match="'inner' uses its input between its Columns and its Row"):
            parallelize(Around(make(kind=Beside)), groups, GATED)(numbers(3, 8).requires_grad_())
        whole, cut = Around(make(kind=Residual)), Around(make(kind=Residual))
        parallelize(cut, groups, {**GATED, "inner": "replicate"})
        assert_gradients_equal(whole, cut, numbers(3, 8), groups)


class Scaled(Residual):
    """A parameter of no linear, such as sinks of heads, with one number for each feature between Columns and Row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 16))

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x) * self.scale)


@pytest.mark.ranks(2)
def test_a_parameter_of_no_linear_is_cut_with_the_features_around_it():
    plan = {"up": "colwise", "gate": "colwise", "scale": "colwise", "down": "rowwise"}
    with live() as groups:
        whole, cut = both(groups, plan, kind=Scaled)
        assert cut.scale.shape == (8,)
        assert_gradients_equal(whole, cut, numbers(3, 8), groups)


class Open(nn.Module):
    """A layer whose linears and norm lie in one module: an open region."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 1)
        self.up, self.also, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        inner = self.norm(x)
        return x + torch.sigmoid(self.gate(x)) * self.down(self.up(inner) * self.also(inner))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Open() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.ranks(2)
def test_open_regions_are_right_for_any_code():
    plan = {"layers.*.up": "colwise", "layers.*.also": "colwise", "layers.*.down": "rowwise"}
    for sequence in (False, True):
        with live(sequence_parallel=sequence) as groups:
            whole, cut = both(groups, plan, kind=Stack)
            assert_gradients_equal(whole, cut, numbers(2, 6, 8), groups)


class Fused(nn.Module):
    """Gate and up in one weight, from whose halves the product is made."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(gate.sigmoid() * up)


@pytest.mark.ranks([pytest.param(2, marks=pytest.mark.storm), 4])
def test_styles():
    with live() as groups:
        pairs = [
            (Fused, {"both": "packed_colwise", "down": "rowwise"}),
            (Fused, {"both": "colwise_gather_output", "down": "rowwise_split_input"}),
            (Mlp, {"up": "colwise_rep", "down": "replicate"}),
            (Mlp, {"down": "rowwise_rep"}),
        ]
        for kind, plan in pairs:
            whole, cut = both(groups, plan, kind=kind)
            assert_gradients_equal(whole, cut, numbers(2, 3, 8), groups)
        whole, cut = nn.Embedding(13, 8).double(), nn.Embedding(13, 8).double()
        cut.load_state_dict(whole.state_dict())
        for model in (whole, cut):
            torch.manual_seed(0)
            nn.init.normal_(model.weight)
        around = parallelize(Around(cut), groups, {"inner": EmbeddingParallel(features=True)})
        assert_gradients_equal(Around(whole), around, IDS, groups)


@pytest.mark.ranks(2)
def test_logits_stay_cut_or_are_gathered():
    with live() as groups:
        whole, cut = both(groups, logits="sharded")
        known, local = parallelization_of(cut), cut(IDS)
        assert local.shape[-1] == 7
        close(known.gather(local), whole(IDS))
        labels = IDS.clone()
        labels[0, :3] = -100
        for shift in (True, False):
            total, count = known.cross_entropy(local, labels, shift=shift)
            logits, targets = (whole(IDS)[:, :-1], labels[:, 1:]) if shift else (whole(IDS), labels)
            expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            close(total / count, expected)
        with pytest.raises(ValueError, match="target 13 is no class"):
            known.cross_entropy(local, IDS + 1)
        _, gathered = both(groups)
        assert gathered(IDS).shape[-1] == 13
        plain = parallelize(make(kind=Mlp), groups, PAIR)
        with pytest.raises(TypeError, match="need logits over a vocabulary"):
            parallelization_of(plain).gather(local)


@pytest.mark.ranks(2)
def test_ids_outside_the_vocabulary():
    with live() as groups:
        _, cut = both(groups)
        with pytest.raises(ValueError, match="id 13 is outside the vocabulary"):
            cut(IDS + 1)


@pytest.mark.ranks(2)
def test_copies_and_conversions_keep_the_records():
    with live(sequence_parallel=True) as groups:
        whole, cut = both(groups)
        records = {name: sharding_of(parameter) for name, parameter in cut.named_parameters()}
        copied = copy.deepcopy(cut)
        layer = copy.deepcopy(cut.layers[0])
        for name, parameter in layer.named_parameters():
            assert sharding_of(parameter) == records[f"layers.0.{name}"]
        for changed in (copied, copy.deepcopy(copied).bfloat16(), copy.deepcopy(copied)):
            assert {name: sharding_of(parameter) for name, parameter in changed.named_parameters()} == records
        copied.load_state_dict(cut.state_dict())
        assert_gradients_equal(whole, copied, IDS, groups)
        assert all(parameter.grad is None for parameter in cut.parameters())
        assert parallelization_of(copied).plan == parallelization_of(cut).plan


@pytest.mark.ranks(2)
def test_a_lost_record_is_noticed():
    with live() as groups:
        _, cut = both(groups)
        cut.layers[0].norm.weight = nn.Parameter(torch.ones(16).double())
        with pytest.raises(RuntimeError, match=re.escape("'layers.0.norm.weight'")):
            PartialGradientReducer(cut, groups).handle_gradient()


@pytest.mark.ranks(2)
def test_the_meta_device():
    with live() as groups:
        _, cut = both(groups)
        with torch.device("meta"):
            empty = Model()
        parallelize(empty, groups, PLAN)
        for (name, here), (_, there) in zip(empty.named_parameters(), cut.named_parameters(), strict=True):
            assert here.is_meta
            assert here.shape == there.shape, name
            assert sharding_of(here) == sharding_of(there)


@pytest.mark.ranks(2)
def test_a_second_call_changes_nothing():
    with live() as groups, live(sequence_parallel=True) as others:
        whole, cut = both(groups)
        before = {name: parameter.clone() for name, parameter in cut.named_parameters()}
        assert parallelize(cut, groups, PLAN) is cut
        assert parallelize(cut, layer_set("auto", groups), PLAN) is cut
        for name, parameter in cut.named_parameters():
            assert torch.equal(parameter, before[name])
        assert_gradients_equal(whole, cut, IDS, groups)
        with pytest.raises(ValueError, match=r"is already sharded over .*, not over"):
            parallelize(cut, others, PLAN)
        with pytest.raises(ValueError, match="by another plan"):
            parallelize(cut, groups, {**PLAN, "head": "replicate"})
        with pytest.raises(ValueError, match="cut with logits='auto', not 'sharded'"):
            parallelize(cut, groups, PLAN, logits="sharded")


@pytest.mark.ranks(2)
def test_two_models_with_plans_of_their_own():
    with live() as groups:
        pairs = [both(groups), both(groups, {"head": ColumnParallel(gather=True)})]
        losses = [model(IDS).pow(2).sum() for pair in pairs for model in pair]
        for loss in losses[::-1]:  # the forwards of all lie between the forward and the backward of each
            loss.backward()
        for whole, cut in pairs:
            assert_gradients_equal(whole, cut, IDS, groups)


@pytest.mark.ranks(2)
def test_describe():
    with live(sequence_parallel=True) as groups:
        text = parallelization_of(both(groups)[1]).describe()
    assert "layers.*.attention.q.weight     ColumnParallel(blocks=1, unit=1, gather=False)  [16, 16]  [8, 16]" in text
    assert re.search(r"layers\.\*\.norm\.weight +whole +\[16\] +\[16\] +tensor", text)
    assert len(text.splitlines()) < 25  # alike layers are one line
    assert parallelization_of(make()) is None


# Bad input, on every rank and before anything is changed


@pytest.mark.ranks(2)
def test_models_that_cannot_be_cut():
    with live() as groups:
        model = make(kind=Mlp)
        with pytest.raises(TypeError, match="DistributedDataParallel; cut the model inside first"):
            parallelize(DistributedDataParallel(model), groups, PAIR)
        model(numbers(1, 8)).sum().backward()
        with pytest.raises(ValueError, match=re.escape("'up.weight' has a gradient of the whole model")):
            parallelize(model, groups, PAIR)
        with pytest.raises(TypeError, match=re.escape("'up.weight' is a DTensor")):
            parallelize(fully_shard(make(kind=Mlp), mesh=groups.mesh("tensor")), groups, PAIR)
        part = parallelize(make(kind=Mlp), groups, PAIR)
        del part.__dict__["par_parallel"]
        with pytest.raises(TypeError, match=re.escape("'up.weight' has a record already")):
            parallelize(part, groups, PAIR)
        fused = make(kind=Mlp)
        fused.use_kernels = True
        with pytest.raises(TypeError, match=r"Mlp runs fused kernels, .* use_kernels=False"):
            parallelize(fused, groups, PAIR)
        with pytest.raises(ValueError, match="logits='all'"):
            parallelize(make(kind=Mlp), groups, PAIR, logits="all")


@pytest.mark.ranks(4)
def test_other_modes():
    square, few = ({"tensor": each} for each in ({"size": 4, "mode": "2d"}, {"size": 4, "mode": "1d"}))
    with (
        ProcessGroups(Topology.from_config(square, 4)) as groups,
        pytest.raises(ValueError, match=r"mode '2d' splits activations.*use mode='1d'"),
    ):
        parallelize(make(), groups, PLAN)
    with (
        ProcessGroups(Topology.from_config(few, 4)) as groups,
        pytest.raises(ValueError, match=r"'layers.0.attention.k.weight': 2 units .*kv_heads=2"),
    ):
        parallelize(make(), groups, PLAN)
    with live() as groups:
        whole, cut = both(groups)
        assert_gradients_equal(whole, cut, IDS, groups)


@pytest.mark.ranks(2)
def test_ranks_that_disagree():
    with live() as groups:
        model = make(kind=Mlp)
        plans = [PAIR, {"up": "colwise"}]
        with pytest.raises(ValueError, match="rank 1 has other plans or models to cut than rank 0"):
            parallelize(model, groups, plans[dist.get_rank()])
        with pytest.raises((TypeError, ValueError), match=r"'up': Partial|matches nothing|has no rules"):
            parallelize(model, groups, [PAIR, {}][dist.get_rank()])
        assert model.up.weight.shape == (16, 8)


@pytest.mark.ranks(2, backend="gloo")
def test_a_backend_that_lacks_a_collective_is_refused_before_anything_is_changed():
    backend = limited_backend("allreduce", "broadcast", "allgather", "_allgather_base")
    tensor = {"size": 2, "mode": "1d", "sequence_parallel": True}
    with ProcessGroups(Topology.from_config({"tensor": tensor}, 2), backend=backend) as groups:
        model = make()
        with pytest.raises(ValueError, match="parallelize needs reduce_scatter, which the backend 'limited'"):
            parallelize(model, groups, PLAN)
        assert parallelization_of(model) is None
        assert_equal_to_one_device(model, make())


@pytest.mark.ranks(2)
def test_a_sequence_that_does_not_divide():
    with live(sequence_parallel=True) as groups:
        _, cut = both(groups)
        with pytest.raises(ValueError, match="has 5 tokens, which do not divide by 2 ranks; pad to a multiple of 2"):
            cut(IDS[:, :5])


class Mixer(nn.Module):
    """Adds the token before to each one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x + self.weight * x.roll(1, 1)


class InRows(Mixer):
    """Gives rows of all tokens, [B S, h]."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


class Mean(Mixer):
    """Gives one token."""

    def forward(self, x):
        return super().forward(x).mean(1, keepdim=True)


class OfRows(Mlp):
    """Its linears are given rows of all tokens."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class Mixing(nn.Module):
    """A layer beside whose MLP something mixes tokens, as a model knows it that is of no known family."""

    def __init__(self, mixer, mlp):
        super().__init__()
        self.mixer, self.mlp = mixer(), mlp(16, 24)

    def forward(self, x):
        return x + self.mlp(x + self.mixer(x).view(len(x), -1, 16))


class Mixed(nn.Module):
    def __init__(self, mixer, mlp=Mlp):
        super().__init__()
        self.layers = nn.ModuleList([Mixing(mixer, mlp)])

    def forward(self, x):
        return self.layers[0](x)


@pytest.mark.ranks(2)
def test_a_part_of_a_layer_that_has_no_rule_sees_the_whole_sequence():
    plan, x = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}, numbers(2, 4, 16)
    with live(sequence_parallel=True) as groups:
        for mixer in (Mixer, InRows):
            whole, cut = make(mixer, kind=Mixed), parallelize(make(mixer, kind=Mixed), groups, plan)
            assert_gradients_equal(whole, cut, x, groups)
        cut = parallelize(make(Mean, kind=Mixed), groups, plan)
        with pytest.raises(ValueError, match=r"'layers.0.mixer' gives a tensor of shape .* sequence dim is unknown"):
            cut(x)
        cut = parallelize(make(Mixer, OfRows, kind=Mixed), groups, plan)
        with pytest.raises(ValueError, match=r"a row is given a tensor of shape \(8, 12\), and cuts its output along"):
            cut(x)


# Beside it


@pytest.mark.ranks(2)
def test_a_plan_is_proven():
    with live() as groups:
        good = verify_plan(make, groups, IDS, PLAN)
        assert good.worst < 1e-12
        assert set(good.gradients) == {name for name, _ in make().named_parameters()}
        wrong = {**PLAN, "layers.*.norm": PartialGradient()}  # whose gradient is whole
        assert verify_plan(make, groups, IDS, wrong).gradients["layers.0.norm.weight"] > 0.1


@pytest.mark.ranks(2)
def test_weight_gradients_can_be_put_off():
    with live() as groups:
        whole, cut = both(groups)
        later = []
        for module in cut.modules():
            if hasattr(module, "weight_grad_hook"):
                module.weight_grad_hook = later.append
        cut(IDS).pow(2).sum().backward()
        assert len(later) == 2 * 6 + 1
        assert cut.layers[0].mlp.up.weight.grad is None
        for gradient in later:
            gradient()
        whole(IDS).pow(2).sum().backward()
        PartialGradientReducer(cut, groups).handle_gradient()
        assert_equal_to_one_device(cut, whole, gradients=True, rtol=1e-10, atol=1e-10, reason=REASON)


def test_one_device_needs_no_groups():
    whole, cut = make(), make()
    parallelize(cut, layer_set(None), PLAN)
    assert torch.equal(cut(IDS), whole(IDS))
    assert type(cut.head) is nn.Linear


@pytest.mark.ranks(2)
def test_transformers_is_not_needed():
    sys.modules["transformers"] = None  # its import fails on this rank
    with pytest.raises(ImportError):
        import transformers  # noqa: F401
    with live(sequence_parallel=True) as groups:
        assert_gradients_equal(*both(groups), IDS, groups)
        with pytest.raises(TypeError, match="'auto' is for models of transformers, and this is a Model"):
            parallelize(make(), groups)


def test_a_cut_model_is_pickled_on_one_device_alone():
    whole = make()
    again = pickle.loads(pickle.dumps(parallelize(make(), layer_set(None), PLAN)))
    assert torch.equal(again(IDS), whole(IDS))
    assert parallelization_of(again).plan == parallelization_of(parallelize(make(), layer_set(None), PLAN)).plan


@pytest.mark.ranks(2)
def test_a_model_that_is_cut_over_ranks_is_not_pickled():
    with live() as groups, pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(both(groups)[1])


def test_transformers_is_never_imported():
    code = "import par_layers, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class OwnLoss(nn.Module):
    """Computes its loss itself, from full logits, and returns it in one of several ways."""

    def __init__(self, gives):
        super().__init__()
        self.gives = gives
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)

    def forward(self, ids, targets=None, *, labels=None):
        hidden = self.emb(ids)
        logits = self.head(hidden)
        given = targets if labels is None else labels
        auxiliary = hidden.square().mean()  # as of routers; no loss of logits
        if given is None:
            return logits, auxiliary
        return self.gives(logits, nn.functional.cross_entropy(logits.flatten(0, 1), given.flatten()), auxiliary)


GIVES = {
    "tuple": lambda logits, loss, auxiliary: (logits, loss),
    "loss": lambda logits, loss, auxiliary: loss + auxiliary,
    "dict": lambda logits, loss, auxiliary: {"logits": logits, "losses": [auxiliary, loss]},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("gives", GIVES)
def test_own_loss_of_sharded_logits_raises_on_every_rank(gives, name):
    ids = torch.arange(6).view(2, 3)  # classes of the first rank, so that its part of the logits would do
    plan = {"head": "colwise_gather_output"}
    with live() as groups:
        model = parallelize(OwnLoss(GIVES[gives]), groups, plan, logits="sharded")
        local, auxiliary = model(ids)  # without a loss of logits
        (local.sum() + auxiliary).backward()
        with pytest.raises(ValueError, match=r"OwnLoss computes its loss itself, and .* pass logits='auto' to parall"):
            model(ids, **{name: ids})
        assert model(ids)[0].shape[-1] == 6
        model = parallelize(OwnLoss(GIVES["loss"]), groups, plan)
        with (
            parallelization_of(model).sharded_logits(),
            pytest.raises(ValueError, match="OwnLoss computes its loss its"),
        ):
            model(ids, **{name: ids})
        close(model(ids, **{name: ids}), OwnLoss(GIVES["loss"])(ids, **{name: ids}))
