import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from par_groups import ProcessGroups, Split, Topology, register_mode
from par_layers import ActivationLayout, ModeRules, WeightSharding, copy_to, layer_set, reduce_from, register_layer_set

from .helpers import FROM_4, assert_layer_equals_one_device, in_the_typical_modes, integers, modes, numbers, run_checks


def groups_of(**parallel):
    return ProcessGroups(Topology.from_config(parallel, dist.get_world_size()))


# Which mode


def test_no_groups_are_one_device():
    assert layer_set().mode is None
    assert layer_set(None).rules == ModeRules()


def test_a_mode_needs_groups():
    with pytest.raises(ValueError, match=r"mode='2d': it needs live groups; use layer_set\('2d', groups\)"):
        layer_set("2d")


@pytest.mark.ranks(4)
def test_auto_takes_the_mode_and_the_options_of_the_topology():
    with groups_of(tensor={"size": 4, "mode": "1d", "sequence_parallel": True}) as groups:
        layers = layer_set("auto", groups)
        assert layers.mode == "1d"
        assert layers.rules.residual == ActivationLayout(sequence=("tensor",))
        assert layer_set("auto", groups, sequence_parallel=False).rules.residual == ActivationLayout()
        assert layer_set("1d", groups).rules.residual == ActivationLayout()
    with groups_of() as groups:
        assert layer_set("auto", groups).mode is None


@pytest.mark.ranks([1, 2])
def test_auto_needs_a_mode_where_there_is_something_to_cut():
    world = dist.get_world_size()
    for topology in (Topology({"data": 1, "tensor": world}), Topology.from_order("tp-dp", tp=world, dp=1)):
        with ProcessGroups(topology) as groups:
            if world == 1:
                assert layer_set("auto", groups).mode is None
                continue
            with pytest.raises(ValueError, match=r"2 ranks on the axis 'tensor', but no mode.* layer_set"):
                layer_set("auto", groups)
            assert layer_set("1d", groups).ColumnLinear(4, 6).weight.shape == (3, 4)
            assert layer_set(None, groups).ColumnLinear(4, 6).weight.shape == (6, 4)
    with ProcessGroups(Topology({"data": world})) as groups:
        assert layer_set("auto", groups).mode is None


@pytest.mark.ranks(2)
def test_an_axis_of_experts_that_no_view_explains_is_refused():
    """On every rank. Experts of a second factorisation are none of these."""
    with ProcessGroups(Topology({"data": 1, "expert": 2})) as groups:
        for mode in ("auto", None):
            with pytest.raises(ValueError, match=r"expert=2: .* no view 'experts', .* use Topology\.from_config"):
                layer_set(mode, groups)
    with groups_of(expert=2) as groups:
        assert layer_set("auto", groups).mode is None
    with ProcessGroups(Topology({"data": 2}).view("experts", {"expert": 2})) as groups:
        assert layer_set("auto", groups).mode is None


@pytest.mark.ranks([1, 4])
def test_a_wrong_mode_or_option_is_named():
    world = dist.get_world_size()
    with groups_of(tensor={"size": world, "mode": "2d"}) as groups:
        with pytest.raises(ValueError, match="no layer set is called '4d'"):
            layer_set("4d", groups)
        with pytest.raises(ValueError, match=r"mode '2d' does not take .* argument 'sequence_parallel'"):
            layer_set("2d", groups, sequence_parallel=True)
        if world > 1:
            with pytest.raises(ValueError, match=r"'output'|'input'|'weight'"):
                layer_set("3d", groups)


@register_mode("pairs")
def pairs(size: int) -> Split:
    return Split(axes=(("pair", size),))


@register_layer_set("pairs")
def pair_layers(grid, *, axis="pair"):
    """What 1d does, over an axis of another name, with the public collectives."""
    group = grid.group((axis,))

    def column(x, weight, bias, hook, linear=None):
        return functional.linear(copy_to(x, group), weight, bias)

    def row(x, weight, bias, hook, linear=None):
        return reduce_from(functional.linear(x, weight), group) + bias

    return ModeRules(
        inner=ActivationLayout(features=(axis,)),
        column=WeightSharding(rows=(axis,)),
        row=WeightSharding(columns=(axis,)),
        column_product=column,
        row_product=row,
        vocabulary=(axis,),
    )


@pytest.mark.ranks(2)
def test_a_mode_of_our_own():
    for mode in modes([{"mode": "pairs"}]):
        pair = lambda layers: torch.nn.Sequential(layers.ColumnLinear(16, 32), layers.RowLinear(32, 16))  # noqa: E731
        assert_layer_equals_one_device(mode, pair, numbers(4, 3, 16))
        assert layer_set("auto", mode.groups, options={"axis": "pair"}).rules.row == mode.layers.rules.row
        with pytest.raises(ValueError, match=r"mode 'pairs' does not take .* argument 'depth'"):
            layer_set("auto", mode.groups, options={"depth": 1})
    with pytest.raises(ValueError, match="registered twice"):
        register_layer_set("pairs")(lambda grid: ModeRules())


# What it does between layers


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_what_is_between_layers_in_the_typical_modes(configs):
    run_checks(
        [
            check_split_and_gather_are_each_others_way_back,
            check_split_cuts_ids_as_embeddings_do,
            check_the_first_token_is_there_on_every_rank_of_its_batch,
        ],
        configs[dist.get_world_size()],
    )


def check_split_and_gather_are_each_others_way_back(mode):
    for shape in ((8, 4, 16), (8, 4, 3, 16), *([] if mode.by_sequence else [(8, 16)])):
        x = numbers(*shape).requires_grad_()
        local, layout = mode.layers.split(x), mode.layers.rules.residual
        assert local.numel() * mode.layers.grid.size(layout.tokens + layout.features) == x.numel()
        whole = mode.layers.gather(local)
        assert torch.equal(whole, x)
        upstream = numbers(*shape, seed=7)
        whole.backward(upstream)
        assert torch.equal(x.grad, upstream)


def check_split_cuts_ids_as_embeddings_do(mode):
    ids = integers(9, 8, 4)
    expected = mode.layers.split(ids.unsqueeze(-1).expand(8, 4, 16).double())[..., 0]
    assert torch.equal(mode.layers.split(ids).double(), expected)


def check_the_first_token_is_there_on_every_rank_of_its_batch(mode):
    x = numbers(8, 4, 16).requires_grad_()
    token = mode.layers.first_token(mode.layers.split(x))
    layout = ActivationLayout(batch=mode.layers.rules.residual.batch, features=mode.layers.rules.residual.features)
    whole = token
    for axes, dim in reversed(mode.layers._cuts(layout, 2)):
        parts = [torch.empty_like(whole) for _ in range(mode.groups.size(axes))]
        dist.all_gather(parts, whole.detach().contiguous(), mode.layers.grid.group(axes))
        whole = torch.cat(parts, dim)
    assert torch.equal(whole, x[:, 0])
    token.sum().backward()
    expected = torch.zeros_like(x)
    expected[:, 0] = 1
    assert torch.equal(x.grad, expected)


@pytest.mark.ranks(2)
def test_a_number_that_is_none_in_another_ranks_tokens_stays_there():
    for mode in modes([{"mode": "1d", "sequence_parallel": True}]):
        x = torch.full((1, 2, 4), float("nan") if dist.get_rank() else 1.0, requires_grad=True)
        token = mode.layers.first_token(x)
        assert token.eq(1).all()
        token.sum().backward()
        assert x.grad.sum().item() == (0 if dist.get_rank() else 4)
