import pytest
import torch
import torch.distributed as dist

from par_groups import sharding_of
from par_layers import PartialGradients, layer_set
from par_layers.examples import GPT, ViT
from par_testing import assert_equal_to_one_device

from .helpers import every_mode, filled, integers, modes, numbers

SIZES = [1, 2, 4, 8]


def gpt(layers, dtype=torch.float64, depth=2, **options):
    return filled(GPT(layers, 30, 16, 4, depth, 12, **options), dtype)


def tokens():
    """Ids and targets, some of them ignored."""
    ids, target = integers(30, 4, 8), integers(30, 4, 8, seed=8)
    target[0, :3] = -100
    return ids, target


def assert_loss_and_gradients_equal(mode, parallel, whole, *batch, **options):
    torch.manual_seed(1)  # of dropout
    expected = whole.loss(*batch, **options)
    torch.manual_seed(1)
    loss = parallel.loss(*batch, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0, msg=lambda text: f"{mode.tensor}: {text}")
    expected.backward()
    loss.backward()
    PartialGradients(parallel, mode.groups).handle_gradient()
    reason = f"fp64 sums in another order: {mode.tensor}"
    assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-9, atol=1e-12, reason=reason)


@pytest.mark.ranks(SIZES)
def test_gpt_gradients_equal_one_device():
    cases = [{}, {"tied": True, "dropout": 0.2}]
    for mode, options in ((mode, options) for mode in every_mode() for options in cases):
        parallel, whole = gpt(mode.layers, **options), gpt(layer_set(None), **options)
        assert_loss_and_gradients_equal(mode, parallel, whole, *tokens(), label_smoothing=0.1)


@pytest.mark.ranks(4)
def test_gpt_with_fewer_key_heads_than_ranks():
    one_d = {"mode": "1d", "kv_heads": 2}
    for mode in modes([one_d, {**one_d, "sequence_parallel": True}]):
        parallel, whole = gpt(mode.layers, key_heads=2), gpt(layer_set(None), key_heads=2)
        assert_loss_and_gradients_equal(mode, parallel, whole, *tokens())


@pytest.mark.ranks(SIZES)
def test_vit_gradients_equal_one_device():
    images, target = numbers(8, 3, 2, 14), integers(5, 8)  # 7 patches and the class token
    for mode in every_mode():
        parallel, whole = (filled(ViT(layers, 2, 8, 16, 4, 2, 5)) for layers in (mode.layers, layer_set(None)))
        assert_loss_and_gradients_equal(mode, parallel, whole, images, target)


@pytest.mark.ranks([4, 8])
def test_several_microbatches_take_one_sum():
    ids, target = tokens()
    for mode in modes():
        parallel, whole = gpt(mode.layers, depth=1), gpt(layer_set(None), depth=1)
        for _ in range(3):
            whole.loss(ids, target).backward()
            parallel.loss(ids, target).backward()
        PartialGradients(parallel, mode.groups).handle_gradient()
        reason = f"fp64 sums in another order: {mode.tensor}"
        assert_equal_to_one_device(parallel, whole, gradients=True, rtol=1e-9, atol=1e-12, reason=reason)


def train(model, groups=None):
    """The losses of ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model.loss(*tokens())
        loss.backward()
        if groups is not None:
            PartialGradients(model, groups).handle_gradient()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def one_device():
    """Ten steps on one device, in the pytest process: the losses in fp32, and in fp64 also the parameters."""
    model = gpt(layer_set(None), depth=1)
    losses = train(model)
    without_key_biases(model)
    return train(gpt(layer_set(None), torch.float32, depth=1)), losses, model.state_dict()


@pytest.mark.ranks([4, 8])
def test_ten_steps_track_one_device(one_device):
    losses_fp32, losses_fp64, parameters = one_device
    assert losses_fp64[-1] < 0.8 * losses_fp64[0]
    for mode in modes():
        assert train(gpt(mode.layers, torch.float32, depth=1), mode.groups) == pytest.approx(losses_fp32, rel=1e-5)
        model = gpt(mode.layers, depth=1)
        assert train(model, mode.groups) == pytest.approx(losses_fp64, rel=1e-10)
        without_key_biases(model)
        reason = f"Adam divides rounding by its own size: {mode.tensor}"
        assert_equal_to_one_device(model, parameters, rtol=1e-8, atol=1e-8, reason=reason)


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
