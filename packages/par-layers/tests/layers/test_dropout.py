import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from par_layers import layer_set
from par_layers._random_bits import random_bits
from par_testing import storm

from ..helpers import FROM_4, MODES, filled, in_the_typical_modes, modes, numbers, run_checks


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_the_mask_is_that_of_one_device,
            check_the_mask_in_the_inner_layout,
        ],
        configs[dist.get_world_size()],
    )


def check_the_mask_is_that_of_one_device(mode):
    for shape in ((8, 4, 16), (8, 4, 3, 16), *([] if mode.by_sequence else [(8, 16)])):
        x = numbers(*shape)
        torch.manual_seed(1)
        expected = layer_set(None).Dropout(0.3)(x)
        torch.manual_seed(1)
        assert torch.equal(mode.layers.gather(mode.layers.Dropout(0.3)(mode.layers.split(x))), expected)
        assert 0 < (expected == 0).sum() < expected.numel()


def check_the_mask_in_the_inner_layout(mode):
    torch.manual_seed(1)
    expected = layer_set(None).Dropout(0.3)(torch.ones(8, 4, 24, dtype=torch.float64))
    column = filled(mode.layers.ColumnLinear(16, 24, init=lambda whole, _: whole.zero_()))
    torch.manual_seed(1)
    ones = torch.ones_like(column(mode.layers.split(numbers(8, 4, 16))))
    assert torch.equal(mode.layers.gather(mode.layers.Dropout(0.3, inner=True)(ones), inner=True), expected)


@pytest.mark.ranks(4)
def test_recomputing_a_checkpointed_region_drops_the_same():
    for mode in modes(MODES[4][1:3]):
        dropout, x = mode.layers.Dropout(0.5), mode.layers.split(numbers(8, 4, 16)).requires_grad_()
        y = checkpoint(lambda x, drop=dropout: drop(drop(x).sin()), x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient == 0, y == 0)


def test_every_call_draws_a_mask_of_its_own():
    dropout, x = layer_set(None).Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    # Two independent masks agree in half of 4096 places, give or take 4 sigma.
    agree = ((first == 0) == (second == 0)).float().mean()
    assert abs(agree - 0.5) < 4 * 0.5 / math.sqrt(4096)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_the_mean_stays(p):
    torch.manual_seed(2)
    dropout, n = layer_set(None).Dropout(p), 400 * 1000
    sigma = math.sqrt(p * (1 - p) / n)  # of the share that is kept
    for _ in range(2):
        kept = dropout(torch.ones(400, 1000))
        assert abs((kept != 0).double().mean() - (1 - p)) < 4 * sigma
        assert torch.equal(kept[kept != 0].unique(), torch.tensor([1 / (1 - p)]))
        rows = (kept != 0).double().mean(1)  # no row or column is special: the variance is that of coins
        assert 0.7 < rows.var() / (p * (1 - p) / 1000) < 1.3  # 400 rows: 4 sigma are 0.28
        columns = (kept != 0).double().mean(0)
        assert 0.8 < columns.var() / (p * (1 - p) / 400) < 1.2  # 1000 columns: 4 sigma are 0.18


def test_evaluation_and_p_of_0_change_nothing_and_draw_nothing():
    x = numbers(4, 4)
    before = torch.get_rng_state()
    assert layer_set(None).Dropout(0.5).eval()(x) is x
    assert layer_set(None).Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_the_dtype_stays_and_gradients_are_masked():
    x = torch.ones(100, dtype=torch.bfloat16, requires_grad=True)
    y = layer_set(None).Dropout(0.5)(x.unsqueeze(0))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(x.grad, y[0])


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_p_out_of_range(p):
    with pytest.raises(ValueError, match=f"p is {p}"):
        layer_set(None).Dropout(p)


def test_the_key_is_drawn_on_the_cpu_whatever_the_default_device_is():
    x = numbers(4, 4)
    torch.manual_seed(1)
    expected = layer_set(None).Dropout(0.5)(x)
    torch.manual_seed(1)
    with torch.device("meta"):
        found = layer_set(None).Dropout(0.5)(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", [179578, 1])
def test_masks_of_two_calls_are_no_shifts_of_each_other(seed):
    """Under the first seed they were, by 14420 places, when the key was only added to the place."""
    torch.manual_seed(seed)
    dropout = layer_set(None).Dropout(0.5)
    windows = []
    for _ in range(2):
        dropped = (dropout(torch.ones(1, 2**16)) == 0).flatten().to(torch.int64)
        # Every run of 62 places as a number. Two independent masks share one with probability 2**32 / 2**62.
        windows.append(sum(dropped[place : dropped.numel() - 62 + place] << place for place in range(62)))
    assert not torch.isin(*windows).any()


def test_keys_that_are_near_each_other_have_masks_that_are_not():
    """Neither along rows nor along columns: every pair of keys agrees in half of the bits, give or take 5 sigma."""
    rows, columns = torch.arange(64).unsqueeze(1), torch.arange(256)
    keys = [*range(16), *(2**bit for bit in range(4, 63)), -1, -(2**63)]
    bits = torch.stack([random_bits(rows, columns, key) for key in keys]) < 0
    signs = bits.flatten(1).float() * 2 - 1  # whose products' sums are whole numbers, exact in fp32
    sigma = 0.5 / math.sqrt(64 * 256)
    for down, right in ((0, 0), (1, 0), (0, 1), (5, 77)):
        moved = bits.roll((down, right), (1, 2)).flatten(1).float() * 2 - 1
        agree = 0.5 + 0.5 * (moved @ signs.T) / signs.shape[1]
        if (down, right) == (0, 0):
            agree.fill_diagonal_(0.5)
        assert (agree - 0.5).abs().max() < 5 * sigma


def test_every_bit_of_a_place_is_a_coin():
    """Each of the 32 bits is set in half of the places, and is independent of each other bit."""
    bits = random_bits(torch.arange(1000).unsqueeze(1), torch.arange(1000), 7).flatten()
    signs = torch.stack([bits >> place & 1 for place in range(32)]).float() * 2 - 1  # fp32 counts to 1e6 exactly
    correlation = signs @ signs.T / 1e6
    assert (correlation - torch.eye(32)).abs().max() < 5e-3  # 5 sigma
    assert signs.mean(1).abs().max() < 5e-3


@pytest.mark.ranks([storm(2), 4])
def test_attention_drops_others_on_each_tensor_rank():
    """All heads are alike, and so are the weights: only what is dropped tells the ranks apart."""
    for mode in modes():
        torch.manual_seed(1)
        before = torch.randint(2**31, (2,))[1]  # what the generator gives after a key
        torch.manual_seed(1)
        values = torch.eye(8, dtype=torch.float64).unsqueeze(0)  # the output is the dropped matrix itself
        mine = mode.layers.attention(values, values, values, head=8, dropout=0.5)
        assert torch.randint(2**31, ()) == before
        torch.manual_seed(1)
        assert torch.equal(mode.layers.attention(values, values, values, head=8, dropout=0.5), mine)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        masks = {tuple((each == 0).flatten().tolist()) for each in every}
        assert len(masks) == dist.get_world_size()
        x = values.clone().requires_grad_()
        y = checkpoint(lambda x, m=mode: m.layers.attention(x, x, x, head=8, dropout=0.5), x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)  # raises where recomputing gives another number of tensors
        assert gradient.isfinite().all()


def test_the_bits_of_a_place_never_change():
    """A run that goes on with a newer version drops the same elements."""
    rows, columns = torch.tensor([[0], [1], [2**33]]), torch.tensor([0, 1, 2**20])
    assert random_bits(rows, columns, 7).tolist() == [
        [281034352, 1845098350, 855947502],
        [1212459525, 1920926844, 1389697330],
        [1566625398, -1451356605, 1289076601],
    ]
    assert torch.equal(random_bits(rows, columns, torch.tensor(7)), random_bits(rows, columns, 7))
