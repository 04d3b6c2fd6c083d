import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from par_layers import layer_set, scatter_to

from ..helpers import FROM_4, in_the_typical_modes, integers, numbers, run_checks


def cut(mode, logits):
    """Whole logits as a vocabulary classifier gives them: in the inner layout, padded with -inf."""
    layout, grid = mode.layers.rules.inner, mode.layers.grid
    padding = -logits.shape[-1] % grid.size(layout.features)
    local = functional.pad(logits, (0, padding), value=-torch.inf)
    for axes, dim in [*(((axis,), 0) for axis in layout.batch), (layout.features, -1)]:
        local = scatter_to(local, grid.group(axes), dim) if grid.size(axes) > 1 else local
    return local


def assert_equal_to_torch(mode, logits, target, exact=1e-10, **options):
    classes = logits.shape[-1]
    mine, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = functional.cross_entropy(other.flatten(0, -2), target.flatten(), **options)
    loss = mode.layers.cross_entropy(cut(mode, mine), target, classes=classes, **options)
    torch.testing.assert_close(loss, expected, rtol=exact, atol=exact, equal_nan=True)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=exact, atol=exact, equal_nan=True)


@pytest.mark.ranks(FROM_4)
@in_the_typical_modes
def test_the_typical_modes(configs):
    run_checks(
        [
            check_cross_entropy_equals_torch,
            check_a_batch_without_targets_gives_what_torch_gives,
            check_a_loss_of_zero_counts_in_the_mean,
            check_large_logits_do_not_overflow,
            check_bfloat16_logits,
            check_a_wrong_target_or_smoothing_is_refused_on_every_rank,
            check_accuracy_equals_one_device_also_where_logits_tie,
            check_every_rank_has_the_same_loss,
        ],
        configs[dist.get_world_size()],
    )


def check_cross_entropy_equals_torch(mode):
    for classes in (16, 13, 5):
        logits, target = 3 * numbers(8, 4, classes), integers(classes, 8, 4)
        ignoring, zero_ignored = target.clone(), target.clone()
        ignoring[0], ignoring[5, 2:] = -100, -100
        zero_ignored[3, 1:] = 0
        assert_equal_to_torch(mode, logits, target)
        assert_equal_to_torch(mode, logits, ignoring, label_smoothing=0.3)
    # The rest does not ask how the classes are padded; padding there is, of 5.
    assert_equal_to_torch(mode, logits, target, label_smoothing=0.1)
    assert_equal_to_torch(mode, logits, ignoring, label_smoothing=1.0)
    assert_equal_to_torch(mode, logits, ignoring)
    assert_equal_to_torch(mode, logits, zero_ignored, ignore_index=0)
    assert_equal_to_torch(mode, logits[:, 0], target[:, 0])


def check_a_batch_without_targets_gives_what_torch_gives(mode):
    logits, target = numbers(8, 4, 13), torch.full((8, 4), -100)
    assert_equal_to_torch(mode, logits, target)
    assert_equal_to_torch(mode, logits, target, label_smoothing=0.1)


def check_a_loss_of_zero_counts_in_the_mean(mode):
    logits, target = torch.zeros(8, 4, 16, dtype=torch.float64), integers(16, 8, 4)
    logits[:4].scatter_(-1, target[:4].unsqueeze(-1), 1e4)  # certain and right: a loss of exactly 0
    assert_equal_to_torch(mode, logits, target)


def check_large_logits_do_not_overflow(mode):
    for dtype in (torch.float64, torch.float32):
        logits = (1e4 * numbers(8, 4, 13).sign()).to(dtype)
        exact = 1e-10 if dtype == torch.float64 else 1e-6  # fp32 rounds at 6e-8, once a term
        assert_equal_to_torch(mode, logits, integers(13, 8, 4), exact=exact)
        assert_equal_to_torch(mode, logits, integers(13, 8, 4), exact=exact, label_smoothing=0.1)


def check_bfloat16_logits(mode):
    logits, target = numbers(8, 4, 13, dtype=torch.bfloat16), integers(13, 8, 4)
    exact = functional.cross_entropy(logits.double().flatten(0, -2), target.flatten())
    mine = logits.clone().requires_grad_()
    loss = mode.layers.cross_entropy(cut(mode, mine), target, classes=13)
    loss.backward()
    assert mine.grad.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)  # computed in fp32
    right = (logits.argmax(-1) == target).double().mean()
    torch.testing.assert_close(
        mode.layers.accuracy(cut(mode, logits), target, classes=13).double(), right, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(mine.grad.double().sum(-1), torch.zeros(8, 4).double(), rtol=0, atol=2**-9)


def check_a_wrong_target_or_smoothing_is_refused_on_every_rank(mode):
    logits, target = numbers(8, 4, 13), integers(13, 8, 4)
    local = cut(mode, logits)
    for wrong in (13, -1, 50):
        target[7, 3] = wrong
        for function in (mode.layers.cross_entropy, mode.layers.accuracy):
            with pytest.raises(ValueError, match=f"target {wrong} is no class: classes are 0 to 12"):
                function(local, target, classes=13)
    target[7, 3] = 0
    for smoothing in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
            mode.layers.cross_entropy(local, target, classes=13, label_smoothing=smoothing)


def check_accuracy_equals_one_device_also_where_logits_tie(mode):
    target = integers(13, 8, 4)
    target[0, :2] = -100
    tied = numbers(8, 4, 13).round()  # several classes share the largest logit
    assert (tied == tied.amax(-1, keepdim=True)).sum() > 40
    for logits in (numbers(8, 4, 13), tied, torch.zeros(8, 4, 13)):
        counted = target != -100
        expected = ((logits.argmax(-1) == target) & counted).sum() / counted.sum()
        found = mode.layers.accuracy(cut(mode, logits), target, classes=13)
        assert found == expected
    whole = mode.layers.split(numbers(8, 13)) if mode.layers.rules.residual.features == () else None
    if whole is not None:
        expected = (numbers(8, 13).argmax(-1) == target[:, 3]).double().mean()
        assert mode.layers.accuracy(whole, target[:, 3], classes=13) == expected


def check_every_rank_has_the_same_loss(mode):
    loss = mode.layers.cross_entropy(cut(mode, numbers(8, 4, 13)), integers(13, 8, 4), classes=13)
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    assert len({each.item() for each in losses}) == 1


def test_on_one_device_it_is_torch():
    logits, target = numbers(8, 13), integers(13, 8)
    loss = layer_set(None).cross_entropy(logits, target, classes=13, label_smoothing=0.1)
    expected = functional.cross_entropy(logits, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
