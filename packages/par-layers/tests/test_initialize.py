import math

import pytest
import torch
from torch import nn

from par_groups import Box, Sharding, on_written, set_sharding, sharding_of, whole, written_
from par_layers import constant, initialize, layer_set, normal, uniform
from par_layers.layers.parallel_layer import ParallelLayer
from par_testing import assert_equal_to_one_device

from .helpers import FROM_4, modes


class Held(ParallelLayer):
    """One parameter of which this rank holds a part."""

    def __init__(self, sharding, local, init):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(local, device="meta"))
        set_sharding(self.weight, sharding)
        self.weight.par_init = init


def drawn(sharding, local, init, seed=3):
    model = Held(sharding, local, init)
    initialize(model, seed)
    return model.weight.detach()


def test_a_rank_draws_its_boxes_alone():
    """The whole tensor would have 250 TB."""
    box = Box((10**9, 1000), (300, 40), 0, (40, 1), (0,))
    for init in (normal(0.02), uniform(0.1), constant(1.0)):
        part = drawn(Sharding((10**10, 6400), (box,)), (300, 40), init)
        assert part.isfinite().all()
        assert part.ne(0).all()


@pytest.mark.parametrize("shape", [(), (7,), (300_000,), (300, 500), (3, 200_000), (5, 70, 11), (6, 5, 4, 3)])
@pytest.mark.parametrize("init", [normal(1.0), uniform(1.0)], ids=["normal", "uniform"])
def test_parts_are_those_of_the_whole_wherever_they_are_cut(shape, init):
    """Also where blocks are cut elsewhere, and where two boxes lie side by side in the local tensor."""
    expected = drawn(whole(shape, (0,)), shape, init)
    for first, last in ((0.0, 0.4), (0.3, 1.0), (0.5, 0.6)):
        start = tuple(int(length * first) for length in shape)
        size = tuple(max(math.ceil(length * last) - begin, 1) for length, begin in zip(shape, start, strict=True))
        box = Box(start, size, 0, whole(size, (0,)).boxes[0].stride, (0,))
        assert torch.equal(drawn(Sharding(shape, (box,)), size, init), expected[box.slices])
    if len(shape) == 2:
        rows, columns = shape
        half = columns // 2
        boxes = [Box((0, side * half), (rows, half), (1 - side) * half, (2 * half, 1), (0,)) for side in range(2)]
        found = drawn(Sharding(shape, tuple(boxes)), (rows, 2 * half), init)
        assert torch.equal(found, expected[:, : 2 * half].roll(half, 1))


def test_names_and_seeds_have_numbers_of_their_own():
    layer = layer_set(None).Linear(64, 64, bias=False)
    initialize(layer, 3)
    first = layer.weight.clone()
    for seed, prefix in ((4, ""), (3, "other."), (2**62, "")):
        initialize(layer, seed, prefix)
        together = torch.stack([first.flatten(), layer.weight.flatten()])
        assert torch.corrcoef(together)[0, 1].abs() < 5 / 64  # 5 sigma


def test_normal_numbers_are_normal():
    """The distance of a million from the normal distribution, moments, and the tail."""
    count = 2**20
    numbers = drawn(whole((1024, 1024), (0,)), (1024, 1024), normal(0.5)).double().div(0.5)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    below = torch.special.ndtr(numbers.flatten().sort().values)
    distance = max((below - steps[:-1]).abs().max(), (below - steps[1:]).abs().max())
    assert distance * math.sqrt(count) < 1.95  # Kolmogorov-Smirnov: one in a thousand is more
    assert abs(numbers.mean()) * math.sqrt(count) < 4
    assert abs(numbers.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs(numbers.pow(4).mean() - 3) < 4 * math.sqrt(96 / count)
    beyond = numbers.abs().gt(4.0).sum()  # 66.4 are expected
    assert 66.4 - 4 * 66.4**0.5 < beyond < 66.4 + 4 * 66.4**0.5
    for dim in (0, 1):  # no row and no column is special
        means = numbers.mean(dim) * 32
        assert abs(means.var() - 1) < 5 * math.sqrt(2 / 1024)


def test_uniform_numbers_are_uniform():
    numbers = drawn(whole((1024, 1024), (0,)), (1024, 1024), uniform(0.25)).double().div(0.25).flatten()
    steps = torch.arange(2**20, dtype=torch.float64) / 2**20
    assert (numbers.sort().values.add(1).div(2) - steps).abs().max() * 1024 < 1.95
    assert numbers.abs().max() <= 1


def test_the_numbers_never_change():
    """A run that is begun again with a newer version begins with the same weights."""
    layer = layer_set(None).Linear(2, 2, bias=False, init=normal(1.0))
    initialize(layer, 3)
    torch.testing.assert_close(
        layer.weight.detach(), torch.tensor([[-0.85955977, 0.4746067], [0.054155827, 0.8301525]]), rtol=1e-6, atol=0
    )


@pytest.mark.ranks([2, *FROM_4])
def test_weights_are_bit_equal_in_every_mode():
    """A rule of one's own fills the whole tensor; so does a zero row on top of it."""

    def whole_only(tensor, generator):
        tensor.normal_(generator=generator)

    def model(layers):
        return nn.ModuleDict(
            {
                "table": layers.VocabEmbedding(50, 16, padding_id=7),
                "own": layers.VocabEmbedding(50, 16, padding_id=7, init=whole_only),
                "column": layers.ColumnLinear(16, 24, init=normal(0.02)),
                "row": layers.RowLinear(24, 16, init=whole_only),
                "norm": layers.LayerNorm(16),
            }
        )

    expected = model(layer_set(None))
    initialize(expected, 5)
    assert expected["table"].weight[7].eq(0).all()
    assert expected["own"].weight[7].eq(0).all()
    assert expected["table"].weight.eq(0).sum() == 16
    for mode in modes():
        found = model(mode.layers)
        initialize(found, 5)
        assert_equal_to_one_device(found, expected)


def test_a_prefix_stands_for_the_rest_of_the_name():
    layers = layer_set(None)
    whole = nn.ModuleDict({"stage": nn.ModuleDict({"linear": layers.Linear(4, 4)})})
    part = nn.ModuleDict({"linear": layers.Linear(4, 4)})
    initialize(whole, seed=3)
    initialize(part, seed=3, prefix="stage.")
    assert torch.equal(whole["stage"]["linear"].weight, part["linear"].weight)
    initialize(part, seed=4, prefix="stage.")
    assert not torch.equal(whole["stage"]["linear"].weight, part["linear"].weight)


def test_parameters_that_are_not_ours():
    model = nn.ModuleDict({"ours": layer_set(None).Linear(4, 4), "torchs": nn.Linear(4, 4)})
    before = model["torchs"].weight.clone()
    initialize(model, seed=3)
    assert torch.equal(model["torchs"].weight, before)
    model["lost"] = nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match=r"'lost.weight' is on the meta device and has no init rule"):
        initialize(model, seed=3)


@pytest.mark.ranks(2)
def test_without_a_seed_the_weights_are_zeros_with_their_records():
    for mode in modes():
        linear = mode.layers.ColumnLinear(4, 6)
        initialize(linear, seed=None)
        assert not linear.weight.is_meta
        assert linear.weight.eq(0).all()
        assert sharding_of(linear.weight).shape == (6, 4)


def test_weights_are_drawn_in_fp32_on_the_cpu_whatever_the_defaults_are():
    expected = layer_set(None).Linear(4, 6)
    initialize(expected, seed=3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        in_half = layer_set(None).Linear(4, 6)
        initialize(in_half, seed=3)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        on_meta = layer_set(None).Linear(4, 6)
        initialize(on_meta, seed=3)
    for model in (in_half, on_meta):
        assert model.weight.dtype == torch.float32
        assert model.weight.device.type == "cpu"
        assert torch.equal(model.weight, expected.weight)
        assert torch.equal(model.bias, expected.bias)


def test_who_waits_for_writes_still_does_after_weights_are_drawn():
    linear, written = layer_set(None).Linear(4, 6), []
    registration = on_written(linear.parameters(), written.extend)
    initialize(linear, seed=3)
    written_(linear.parameters())
    assert [id(each) for each in written] == [id(each) for each in linear.parameters()]
    registration.remove()
    written_(linear.parameters())
    assert len(written) == 2
