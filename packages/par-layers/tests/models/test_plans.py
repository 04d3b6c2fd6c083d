"""Plans, and what is refused: pure, no ranks."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from par_groups import Topology
from par_layers import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertTensorParallel,
    PartialGradient,
    RowParallel,
    plan_shardings,
    register_plan,
    register_style,
)

from .helpers import Mlp

PAIR = {"up": "colwise", "down": "rowwise"}


def ranks(size: int = 2, **options: Any) -> Topology:
    return Topology.from_config({"tensor": {"size": size, "mode": "1d", **options}}, size)


class Layered(nn.Module):
    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(13, width)
        self.layers = nn.ModuleList(Mlp(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 13, bias=False)


class Attention(nn.Module):
    """Two heads of keys and values for four of queries, of four features each."""

    def __init__(self, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.num_key_value_heads = 4, heads, key_heads
        self.q = nn.Linear(16, heads * 4)
        self.k = nn.Linear(16, key_heads * 4)
        self.norm = nn.LayerNorm(4)
        self.o = nn.Linear(heads * 4, 16)


HEADS = {"q": "colwise", "k": "colwise", "norm": PartialGradient(), "o": "rowwise"}


def boxes(model: nn.Module, topology: Topology, plan: Any, rank: int = 0) -> dict[str, list[tuple[Any, ...]]]:
    found = plan_shardings(model, topology, rank, plan)
    return {name: [(box.start, box.size, box.sum_over) for box in each.boxes] for name, each in found.items()}


def test_a_pattern_stands_for_every_number():
    plan = {
        "table": EmbeddingParallel(),
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": ColumnParallel(gather=True),
    }
    with torch.device("meta"):
        model = Layered()
    assert boxes(model, ranks(), plan, rank=1) == {
        "table.weight": [((7, 0), (6, 8), ())],  # 13 rows: 7 here, and 6 and a padding there
        **{
            f"layers.{layer}.{name}": box
            for layer in range(2)
            for name, box in {
                "up.weight": [((8, 0), (8, 8), ())],
                "up.bias": [((8,), (8,), ())],
                "down.weight": [((0, 8), (8, 8), ())],
                "down.bias": [((0,), (8,), ())],
            }.items()
        },
        "head.weight": [((7, 0), (6, 8), ())],
    }


def test_blocks_are_each_cut_by_themselves():
    fused = nn.Sequential(nn.Linear(4, 12), nn.Linear(4, 4))
    found = boxes(fused, ranks(), {"0": ColumnParallel(blocks=(4, 8)), "1": RowParallel(blocks=2)}, rank=1)
    assert found["0.weight"] == [((2, 0), (2, 4), ()), ((8, 0), (4, 4), ())]
    assert found["1.weight"] == [((0, 1), (4, 1), ()), ((0, 3), (4, 1), ())]


def test_heads_stay_together_and_few_of_them_are_copied():
    found = boxes(Attention(), ranks(4, kv_heads=2), HEADS, rank=3)
    assert found["q.weight"] == [((12, 0), (4, 16), ())]
    assert found["k.weight"] == [((4, 0), (4, 16), ("kv_copy",))]
    assert found["norm.weight"] == [((0,), (4,), ("kv_head", "kv_copy"))]
    assert found["o.bias"] == [((0,), (16,), ())]


def test_sequence_parallelism_makes_gradients_of_layers_partial():
    model = nn.ModuleDict({"layers": nn.ModuleList([Layered().layers[0], nn.LayerNorm(8)]), "norm": nn.LayerNorm(8)})
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    found = boxes(model, ranks(sequence_parallel=True), plan)
    assert {name for name, (box,) in found.items() if box[-1]} == {
        "layers.0.down.bias",
        "layers.1.weight",
        "layers.1.bias",
    }


def test_one_rank_cuts_nothing():
    for topology in (Topology({"data": 2}), ranks(1)):
        found = plan_shardings(Mlp(), topology, 0, PAIR)
        assert all(box.size == each.shape for each in found.values() for box in each.boxes)


def packed(width: int) -> nn.Module:
    """The packed weights of three experts."""
    model = nn.ModuleDict({"experts": nn.Module()})
    model["experts"].gate_up = nn.Parameter(torch.zeros(3, 2 * width, 5))
    model["experts"].down = nn.Parameter(torch.zeros(3, 5, width))
    return model


WIDE = {"experts": ExpertTensorParallel(), "experts.gate_up": "packed_colwise", "experts.down": "rowwise"}

REFUSED: list[tuple[str, Any, Any, type[Exception], str]] = [
    ("no plan", Mlp, "auto", TypeError, "'auto' is for models of transformers, and this is a Mlp; give a plan"),
    ("no rules", Mlp, {}, TypeError, "has no rules"),
    ("another word", Mlp, "car", ValueError, "plan is 'car'"),
    ("an unknown style", Mlp, {"up": "colwize"}, ValueError, "did you mean 'colwise'"),
    ("no style", Mlp, {"up": 3}, TypeError, "the rule of 'up' is 3; give a style"),
    ("nothing matches", Layered, {"layers.*.upp": "colwise"}, ValueError, r"nearest names are 'layers.*.up'"),
    ("two rules", Layered, {"layers.*.up": "colwise", "layers.0.up": "colwise"}, ValueError, "matched by two rules"),
    ("no experts", Mlp, {"up": "ep_dispatch_experts"}, TypeError, "'up' is a Linear without the attributes has_gate"),
    ("a style that was", Mlp, {"up": "ep_router"}, ValueError, "removed by transformers; use ep_dispatch_experts"),
    ("a size", lambda: Mlp(8, 15), PAIR, ValueError, "'up.weight': 15 units of 1 features do not divide by 2 ranks"),
    ("a row's size", lambda: Mlp(7, 16), {"down": ColumnParallel()}, ValueError, "'down.weight': 7 units"),
    ("experts' width", lambda: packed(5), WIDE, ValueError, "'experts.gate_up': 5 units of 1 features do not divide"),
    ("another's plan", Layered, {"model.layers.*.mlp.up": "colwise"}, ValueError, "matches nothing in the model"),
    ("not a linear", Layered, {"table": "colwise"}, TypeError, "are for an nn.Linear, and this is a Embedding"),
    ("not an embedding", Mlp, {"up": EmbeddingParallel()}, TypeError, "the rule Vocabulary is for an nn.Embedding"),
    ("a parameter", Mlp, {"up.weight": "colwise"}, TypeError, "cannot cut a parameter of shape (16, 8)"),
    ("blocks, gathered", Mlp, lambda: {"up": ColumnParallel(blocks=2, gather=True)}, ValueError, "in another order"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_a_bad_plan_is_refused(case):
    _, make, plan, error, message = case
    with pytest.raises(error, match=re.escape(message)):
        plan_shardings(make(), ranks(), plan=plan() if callable(plan) else plan)


def test_few_heads_name_the_config_that_copies_them():
    with pytest.raises(ValueError, match=re.escape("'k.weight': 2 units of 4 features") + ".*kv_heads=2"):
        plan_shardings(Attention(), ranks(4), plan=HEADS)


def test_a_tied_pair_has_one_rule():
    model = Layered()
    model.head.weight = model.table.weight
    with pytest.raises(ValueError, match=r"'table.weight' and 'head.weight' are one parameter"):
        plan_shardings(model, ranks(), plan={"table": EmbeddingParallel()})
    both = {"table": EmbeddingParallel(), "head": ColumnParallel(gather=True)}
    assert "head.weight" not in plan_shardings(model, ranks(), plan=both)


def test_a_linear_that_multiplies_in_its_own_way():
    class Quantised(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = Mlp()
    model.up = Quantised(8, 16)
    with pytest.raises(TypeError, match="'up': Quantised multiplies in its own way"):
        plan_shardings(model, ranks(), plan=PAIR)


def pruned(linear):
    prune.l1_unstructured(linear, "weight", 0.5)


COMPUTED = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "spectral_norm, by hooks": nn.utils.spectral_norm,
    "pruned": pruned,
}


@pytest.mark.parametrize("way", COMPUTED)
@pytest.mark.parametrize("name", ["up", "table"])
def test_a_weight_that_is_computed_is_refused(way, name):
    model = nn.ModuleDict({"up": nn.Linear(8, 16), "table": nn.Embedding(16, 8)})
    COMPUTED[way](model[name])
    with pytest.raises(TypeError, match=f"'{name}': its weight is computed, as by weight_norm.*use 'replicate'"):
        plan_shardings(model, ranks(), plan={name: "colwise" if name == "up" else EmbeddingParallel()})
    other = "table" if name == "up" else "up"
    found = plan_shardings(model, ranks(), plan={other: "colwise" if other == "up" else EmbeddingParallel()})
    own = [path for path in found if path.startswith(name)]  # it stays whole, whatever its tensors are called
    assert own
    assert all(found[path].boxes[0].size == found[path].shape for path in own)


def test_a_weight_of_a_tensor_subclass_is_refused():
    class Quantised(nn.Parameter):
        pass

    model = Mlp()
    model.up.weight = Quantised(torch.zeros(16, 8))
    with pytest.raises(TypeError, match=r"'up': its weight is a Quantised, and only a plain nn.Parameter can be cut"):
        plan_shardings(model, ranks(), plan=PAIR)


def test_experts_without_a_cut_weight_are_refused():
    with pytest.raises(TypeError, match="'experts' has the rule 'moe_tp_experts', but no rule cuts a weight inside it"):
        plan_shardings(packed(4), ranks(), plan={"experts": ExpertTensorParallel()})


def test_cut_weights_of_experts_without_a_rule_around_them_are_refused():
    plan = {"experts.gate_up": "packed_colwise", "experts.down": "rowwise"}
    with pytest.raises(TypeError, match=r"'experts.gate_up' has the rule .* give 'experts' the rule 'moe_tp_experts'"):
        plan_shardings(packed(4), ranks(), plan=plan)


class Latents(nn.Module):
    """The projections of latent attention: the last features of `down` are keys that every head has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.kv_lora_rank = 2, 6
        self.down, self.up, self.o = nn.Linear(8, 8), nn.Linear(6, 20), nn.Linear(10, 8)


def test_a_style_of_latents_asks_the_module_around_the_linear():
    plan = {"down": "mla_kv_a_proj", "up": "colwise", "o": "rowwise"}
    with pytest.raises(ValueError, match=r"'mla_kv_a_proj', but neither a module around it nor the config has"):
        plan_shardings(Latents(), ranks(), plan=plan)
    for holder in ("module", "config"):
        model = Latents()
        if holder == "module":
            model.qk_rope_head_dim = 2
        else:
            model.config = SimpleNamespace(qk_rope_head_dim=2)
        assert boxes(model, ranks(), plan)["up.weight"] == [((0, 0), (10, 6), ())]  # one of two heads


def test_other_modes_and_models_that_have_no_layers():
    square = Topology.from_config({"tensor": {"size": 4, "mode": "2d"}}, 4)
    with pytest.raises(ValueError, match=r"mode '2d' splits activations.*use mode='1d'"):
        plan_shardings(Mlp(), square, plan=PAIR)
    with pytest.raises(TypeError, match=r"no single nn.ModuleList"):
        plan_shardings(Mlp(), ranks(sequence_parallel=True), plan=PAIR)


def test_a_part_before_a_column_needs_a_closed_region():
    plan = {**HEADS, "norm": PartialGradient(before=True)}
    del plan["o"]
    with pytest.raises(ValueError, match=r"'norm' is .* but '' is an open region"):
        plan_shardings(Attention(), ranks(), plan=plan)


def test_a_style_of_ones_own():
    @register_style("test_plans.halves")
    def halves(module):
        return ColumnParallel(blocks=(module.out_features // 2,) * 2)

    found = boxes(Mlp(), ranks(), {"up": "test_plans.halves", "down": "packed_rowwise"})
    assert found["up.weight"] == [((0, 0), (4, 8), ()), ((8, 0), (4, 8), ())]
    with pytest.raises(ValueError, match="registered twice"):
        register_style("colwise")(halves)

    @register_style("test_plans.wrong")
    def wrong(module):
        return "colwise"

    with pytest.raises(TypeError, match="gave 'colwise' for 'up'"):
        plan_shardings(Mlp(), ranks(), plan={"up": "test_plans.wrong"})


def test_experts_have_packed_weights():
    found = boxes(packed(4), ranks(), WIDE, rank=1)
    assert found["experts.gate_up"] == [((0, 2, 0), (3, 2, 5), ()), ((0, 6, 0), (3, 2, 5), ())]
    assert found["experts.down"] == [((0, 0, 2), (3, 5, 2), ())]


def test_a_family_has_one_plan():
    with pytest.raises(ValueError, match="the plan 'gpt2' is registered twice"):
        register_plan("gpt2")(lambda config: {})
