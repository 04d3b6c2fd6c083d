import pytest
import torch
import torch.distributed as dist

from par_groups import sharding_of
from par_layers import PartialGradientReducer, layer_set
from par_layers.examples import GPT, ViT
from par_testing import assert_equal_to_one_device, storm

from .helpers import every_config, filled, integers, modes, numbers, run_checks

SIZES = [1, storm(2), 4, 8]  # 4 ranks have every mode of 2


def gpt(layers, dtype=torch.float64, depth=1, **options):
    return filled(GPT(layers, 30, 16, 4, depth, 12, **options), dtype)


def tokens():
    """Ids and targets, some of them ignored."""
    ids, target = integers(30, 4, 8), integers(30, 4, 8, seed=8)
    target[0, :3] = -100
    return ids, target


def assert_loss_and_gradients_equal(mode, parallel, whole, *microbatches, **options):
    """The losses of the microbatches, and their gradients, which partial sums are added up of once."""
    for batch in microbatches:
        torch.manual_seed(1)  # of dropout
        expected = whole.loss(*batch, **options)
        torch.manual_seed(1)
        loss = parallel.loss(*batch, **options)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0, msg=lambda text: f"{mode.tensor}: {text}")
        expected.backward()
        loss.backward()
    PartialGradientReducer(parallel, mode.groups).handle_gradient()
    reason = f"fp64 sums in another order: {mode.tensor}"
    assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-9, atol=1e-12, reason=reason)


@pytest.mark.ranks(SIZES)
def test_gradients_equal_one_device():
    run_checks([check_a_gpt, check_two_steps_of_a_tied_gpt_with_dropout, check_a_vit], every_config())


def check_a_gpt(mode):
    parallel, whole = gpt(mode.layers), gpt(layer_set(None))
    assert_loss_and_gradients_equal(mode, parallel, whole, tokens(), label_smoothing=0.1)


def check_two_steps_of_a_tied_gpt_with_dropout(mode):
    """The first one of two microbatches."""
    parallel, whole = (gpt(layers, tied=True, dropout=0.2) for layers in (mode.layers, layer_set(None)))
    ids, target = tokens()
    first, second = (ids, target), (ids.flip(0), target.flip(0))
    assert_loss_and_gradients_equal(mode, parallel, whole, first, second)
    for model in (parallel, whole):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    assert_loss_and_gradients_equal(mode, parallel, whole, first)


def check_a_vit(mode):
    batch = numbers(8, 3, 2, 14), integers(5, 8)  # 7 patches and the class token
    parallel, whole = (filled(ViT(layers, 2, 8, 16, 4, 1, 5)) for layers in (mode.layers, layer_set(None)))
    assert_loss_and_gradients_equal(mode, parallel, whole, batch)


@pytest.mark.ranks(4)
def test_gpt_with_fewer_key_heads_than_ranks():
    one_d = {"mode": "1d", "kv_heads": 2}
    for mode in modes([one_d, {**one_d, "sequence_parallel": True}]):
        parallel, whole = (gpt(layers, depth=2, key_heads=2) for layers in (mode.layers, layer_set(None)))
        assert_loss_and_gradients_equal(mode, parallel, whole, tokens())


def train(model, steps, groups=None):
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*tokens())
        loss.backward()
        if groups is not None:
            PartialGradientReducer(model, groups).handle_gradient()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def one_device():
    """Steps on one device, in the pytest process: by the number of steps, losses and parameters in fp64; in fp32."""
    in_fp64 = {}
    for steps in (3, 10):
        model = gpt(layer_set(None))
        losses = train(model, steps)
        without_key_biases(model)
        in_fp64[steps] = losses, model.state_dict()
    return in_fp64, train(gpt(layer_set(None), torch.float32), 3)


@pytest.mark.ranks(4)
def test_several_steps_of_adam_track_one_device(one_device):
    in_fp64, losses_in_fp32 = one_device
    for mode in modes():
        steps = 10 if mode.by_sequence else 3  # three show what one step leaves behind for the next
        losses, parameters = in_fp64[steps]
        model = gpt(mode.layers)
        assert train(model, steps, mode.groups) == pytest.approx(losses, rel=1e-10)
        without_key_biases(model)
        reason = f"Adam divides rounding by its own size: {mode.tensor}"
        assert_equal_to_one_device(model, parameters, rtol=1e-8, atol=1e-8, reason=reason)
        if mode.tensor["mode"] == "2d":
            in_fp32 = train(gpt(mode.layers, torch.float32), 3, mode.groups)
            assert in_fp32 == pytest.approx(losses_in_fp32, rel=1e-5)


def test_ten_steps_learn(one_device):
    losses, _ = one_device[0][10]
    assert losses[-1] < 0.8 * losses[0]


@torch.no_grad()
def without_key_biases(model):
    """Sets them to 0: softmax does not see them, so their gradient is rounding noise, which Adam makes large."""
    for block in model.blocks:
        bias, width = block.query_key_value.bias, block.output.out_features
        for box in sharding_of(bias).boxes:
            if width <= box.start[0] < 2 * width:
                box.of(bias).zero_()
            elif box.start[0] < width < box.start[0] + box.size[0]:
                box.of(bias)[width : 2 * width].zero_()


@pytest.mark.ranks(2)
def test_the_loss_is_the_same_number_on_every_rank():
    for mode in modes():
        loss = gpt(mode.layers, torch.float32).loss(*tokens())
        losses = [torch.zeros_like(loss) for _ in range(2)]
        dist.all_gather(losses, loss.detach())
        assert torch.equal(*losses)
