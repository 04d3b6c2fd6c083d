"""Stochastic rounding: exact against a model in plain integers, and good as random numbers."""

import importlib
import itertools
import math
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from par_groups import Box, Segment, Segments, Sharding, cut, set_segments, set_sharding, whole
from par_precision import stochastic_round_
from par_precision.rounding import tiles
from par_precision.rounding.matrices import SPREAD, keys_of, signed
from par_precision.rounding.rounding import Rounding, round_all_
from par_testing import default_device_type

HALVES = (torch.bfloat16, torch.float16)
DROPPED = {torch.bfloat16: 16, torch.float16: 13}
EVERY_BIT = 2**32 - 1


def rounded(source, seed=1, step=2, *, name="w", dtype=torch.bfloat16):
    target = torch.full(source.shape, 7.0, dtype=dtype)
    stochastic_round_(target, source, seed, step, name=name)
    return target


def hashed(index, keys):
    """The hash as its definition reads, on Python's integers."""
    state = (index * 0x9E3779B1 + keys[0]) & EVERY_BIT
    state ^= state >> 16
    state = (state * 0x21F0AAAD + keys[1]) & EVERY_BIT
    state ^= state >> 15
    return state * 0x735A2D97 & EVERY_BIT


def modelled(values, indices, keys, dtype):
    """Normal numbers: the random number is added to the bits that the target lacks, which are then cut off."""
    dropped = DROPPED[dtype]
    bits = [value & EVERY_BIT for value in values.view(torch.int32).flatten().tolist()]
    cut_off = [
        (value + (hashed(index, keys) >> (32 - dropped))) >> dropped << dropped
        for value, index in zip(bits, indices, strict=True)
    ]
    signed = [value - 2**32 if value >= 2**31 else value for value in cut_off]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32).view(values.shape).to(dtype)


def same(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(), (1,), (123,), (15, 17), (3, 5, 7)])
def test_every_element_equals_the_model(shape, dtype):
    source = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = modelled(source, range(source.numel()), keys_of(1, 2, "w"), dtype)
    assert same(rounded(source, dtype=dtype), expected)


def test_indices_above_32_bits_equal_the_model():
    rows, columns = 2**20, 2**14
    source = torch.randn(3, 5)
    target = torch.empty(3, 5, dtype=torch.bfloat16)
    start = (rows - 3, columns - 5)
    set_sharding(target, Sharding((rows, columns), (Box(start, (3, 5), 0, (5, 1), (0,)),)))
    stochastic_round_(target, source, 1, 2, name="w")
    indices = [(start[0] + row) * columns + start[1] + column for row in range(3) for column in range(5)]
    assert same(target, modelled(source, indices, keys_of(1, 2, "w"), torch.bfloat16))


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_the_size_of_a_tile_changes_nothing(tile, monkeypatch):
    sources = [torch.randn(shape) for shape in [(100,), (9, 11), (2, 50), (50, 2)]]
    expected = [rounded(source.t(), dtype=torch.float16) for source in sources[1:]]
    expected += [rounded(source) for source in sources]
    monkeypatch.setattr(tiles, "_TILE", tile)
    found = [rounded(source.t(), dtype=torch.float16) for source in sources[1:]]
    found += [rounded(source) for source in sources]
    assert all(same(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_the_target_can_hold_stays_what_it_is(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = every[~every.isnan() & (every != 0)]
    for step in range(10):
        assert same(rounded(numbers.float(), step=step, dtype=dtype), numbers)
    assert rounded(torch.zeros(1000), dtype=dtype).eq(0).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_nan_and_infinities_stay(dtype):
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -8388607], dtype=torch.int32)
    for step in range(20):
        assert rounded(bits.view(torch.float32), step=step, dtype=dtype).isnan().all()
        infinities = torch.tensor([math.inf, -math.inf] * 10)
        assert torch.equal(rounded(infinities, step=step, dtype=dtype).float(), infinities)


@pytest.mark.parametrize(
    ("dtype", "largest", "value", "chance"),
    [(torch.float16, 65504, 65508, 4 / 32), (torch.bfloat16, 2**128 - 2**120, 2**128 - 2**118, 3 / 4)],
)
def test_beyond_the_largest_number_infinity_is_a_neighbour_like_any_other(dtype, largest, value, chance):
    found = rounded(torch.full((10_000,), float(value)), dtype=dtype).double()
    assert set(found.tolist()) == {float(largest), math.inf}
    assert abs(found.isinf().double().mean() - chance) < 4 * math.sqrt(chance * (1 - chance) / 10_000)
    assert rounded(torch.full((1000,), float(largest)), dtype=dtype).isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_result_is_one_of_the_two_neighbours(dtype):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(100_000, generator=generator) * torch.randn(100_000, generator=generator).mul(4).exp2() * 1e-3
    result = rounded(source, dtype=dtype)
    nearest = source.to(dtype)
    after = torch.nextafter(nearest, torch.where(nearest.float() < source, math.inf, -math.inf).to(dtype))
    assert ((result == nearest) | (result == after)).all()
    exact = nearest.float() == source
    assert torch.equal(result[exact], nearest[exact])


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.bfloat16, 1e-39), (torch.float16, 1.0), (torch.float16, 1e-6)]
)
def test_the_mean_error_is_within_four_sigma_of_zero(dtype, scale):
    """Of 400,000 values, and of their two signs, subnormal ones included."""
    count = 400_000
    source = torch.randn(count, generator=torch.Generator().manual_seed(1)) * scale
    error = rounded(source, dtype=dtype).double() - source.double()
    for part in (error, error[source > 0], error[source < 0]):
        assert part.abs().max() > 0
        assert abs(part.mean()) < 4 * part.std() / math.sqrt(part.numel())


@pytest.mark.parametrize(
    ("dtype", "base", "ulp"),
    [
        (torch.bfloat16, 1.0, 2.0**-7),
        (torch.float16, 1.0, 2.0**-10),
        (torch.float16, 3 * 2.0**-16, 2.0**-24),  # subnormal
        (torch.float16, 2.0**-24, 2.0**-24),
    ],
)
@pytest.mark.parametrize("fraction", [1 / 256, 0.25, 0.5, 0.875])
def test_the_chance_to_round_up_is_the_distance_from_below(dtype, base, ulp, fraction):
    count = 100_000
    for sign in (1.0, -1.0):
        found = rounded(torch.full((count,), sign * (base + fraction * ulp)), dtype=dtype).double()
        up = (found.abs() > base).double().mean()
        assert abs(up - fraction) < 4 * math.sqrt(fraction * (1 - fraction) / count)


def test_updates_too_small_for_round_to_nearest_add_up():
    """1000 times 2**-12 added to 1: round-to-nearest stays at 1."""
    weights = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1000):
        stochastic_round_(weights, weights.float() + 2**-12, 0, step, name="w")
    expected = 1 + 1000 * 2**-12
    # a step's variance is below ulp * 2**-12 with ulp 2**-7
    assert abs(weights.double().mean() - expected) < 4 * math.sqrt(1000 * 2**-19 / 4096)


def random_numbers(seed, step, name, count=1 << 17):
    """The upper 16 bits of the hash, which are what bf16 takes."""
    keys = keys_of(seed, step, name)
    state = (torch.arange(count) * SPREAD + keys[0]).to(torch.int32)
    tiles.mix_(state, torch.empty_like(state), torch.tensor(signed(keys[1]), dtype=torch.int32))
    return (state >> 16) & 0xFFFF


def test_the_random_numbers_are_those_of_the_model():
    found = random_numbers(3, 4, "w", 1000)
    assert found.tolist() == [hashed(index, keys_of(3, 4, "w")) >> 16 for index in range(1000)]


def test_random_numbers_are_uniform():
    """Chi-square with 255 degrees of freedom of the upper and the lower byte; 5 sigma."""
    for step in range(20):
        numbers = random_numbers(0, step, "w")
        for byte in (numbers >> 8, numbers & 0xFF):
            counts = torch.bincount(byte, minlength=256).double()
            expected = numbers.numel() / 256
            chi = ((counts - expected) ** 2 / expected).sum().item()
            assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


def standardised(numbers):
    """Of mean 0 and variance 1."""
    numbers = numbers.float()
    return (numbers - numbers.mean()) / numbers.std()


def correlation(one, other):
    """Of standardised numbers, in standard deviations of what independent ones have."""
    return one.dot(other).item() / math.sqrt(one.numel())


def test_elements_are_not_correlated_with_their_neighbours():
    numbers = random_numbers(0, 0, "w")
    parts = {"number": standardised(numbers)} | {bit: standardised(numbers >> bit & 1) for bit in (0, 7, 15)}
    for lag in [*range(1, 65), *(2**power for power in range(7, 17)), 768, 1000, 3072]:
        for name, part in parts.items():
            assert abs(correlation(part[:-lag], part[lag:])) < 5, (lag, name)


def test_steps_seeds_and_names_are_not_correlated():
    base = standardised(random_numbers(0, 0, "w"))
    others = [(0, step, "w") for step in range(1, 30)] + [(seed, 0, "w") for seed in range(1, 30)]
    others += [(0, 0, f"layers.{layer}.w") for layer in range(30)]
    for other in others:
        numbers = standardised(random_numbers(*other))
        assert abs(correlation(base, numbers)) < 5, other
        assert abs(correlation(base[1:], numbers[:-1])) < 5, other


def test_another_seed_step_or_name_rounds_differently():
    source = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    results = [rounded(source), rounded(source, seed=2), rounded(source, step=3), rounded(source, name="v")]
    assert same(results[0], rounded(source))
    for one, other in itertools.combinations(results, 2):
        differing = (one != other).double().mean()
        assert abs(differing - 1 / 3) < 0.02  # the mean of 2 * p * (1 - p), and 4 sigma of 10,000


def part_of(whole_source, box):
    """The rounding of a part alone, its elements in a local tensor as the box says."""
    source = torch.zeros(box.last + 1)
    box.of(source).copy_(whole_source[box.slices])
    target = torch.zeros(box.last + 1, dtype=torch.bfloat16)
    set_sharding(target, Sharding(tuple(whole_source.shape), (box,)))
    stochastic_round_(target, source, 1, 2, name="w")
    return box.of(target)


@given(st.data())
def test_a_part_rounds_like_the_same_elements_of_the_whole(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    start = tuple(data.draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(data.draw(st.integers(1, length - first)) for length, first in zip(shape, start, strict=True))
    order = data.draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), data.draw(st.integers(1, 3))
    for dim in order:  # dims lie in memory in any order, with gaps
        stride[dim], step = step, step * size[dim]
    box = Box(start, size, data.draw(st.integers(0, 5)), tuple(stride), (0,))
    source = torch.randn(shape)
    assert same(part_of(source, box).contiguous(), rounded(source)[box.slices].contiguous())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_flat_shares_of_a_packed_buffer_round_like_the_tensors_alone(ranks):
    """As ZeRO deals them out: equal ranges of a flat buffer, which end anywhere in a parameter."""
    sources = {"first": torch.randn(15, 17), "second": torch.randn(123), "third": torch.randn(3, 5, 7)}
    alone = torch.cat([rounded(source, name=name).flatten() for name, source in sources.items()])
    flat = torch.cat([source.flatten() for source in sources.values()])
    length = -(-flat.numel() // ranks)
    for rank in range(ranks):
        low, high = rank * length, min((rank + 1) * length, flat.numel())
        segments, begin = [], 0
        for name, source in sources.items():
            end = begin + source.numel()
            if max(begin, low) < min(end, high):
                record = whole(source.shape, (0,))
                part = cut(record, max(low - begin, 0), min(end, high) - begin, offset=max(begin - low, 0))
                segments.append(Segment(name, part))
            begin = end
        target = torch.zeros(high - low, dtype=torch.bfloat16)
        set_segments(target, Segments(segments))
        stochastic_round_(target, flat[low:high], 1, 2, name="unused")
        assert same(target, alone[low:high])


def test_padding_stays():
    target = torch.full((6,), 3.0, dtype=torch.bfloat16)
    set_sharding(target, Sharding((4,), (Box((0,), (4,), 1, (1,), (0,)),)))
    stochastic_round_(target, torch.zeros(6), 0, 0)
    assert target.tolist() == [3, 0, 0, 0, 0, 3]


def test_tensors_that_are_not_contiguous_round_by_their_logical_index():
    source = torch.randn(12, 34)
    expected = rounded(source)
    transposed = torch.empty(34, 12, dtype=torch.bfloat16).t()
    stochastic_round_(transposed, source.t().contiguous().t(), 1, 2, name="w")
    assert same(transposed.contiguous(), expected)
    every_other = torch.zeros(12, 68, dtype=torch.bfloat16)
    stochastic_round_(every_other[:, ::2], source, 1, 2, name="w")
    assert same(every_other[:, ::2].contiguous(), expected)
    assert every_other[:, 1::2].eq(0).all()


def test_parameters_that_require_gradients_and_empty_tensors_work():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    stochastic_round_(parameter, torch.ones(4), 0, 0)
    assert parameter.eq(1).all()
    assert rounded(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.ranks([1, 2, 4])
def test_replicas_and_every_cut_of_a_dtensor_round_like_one_device():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(default_device_type(), (dist.get_world_size(),))
    for shape in [(15, 17), (123,), (4, 6, 8), (3, 2)]:
        source = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        for placement in [Replicate(), *(Shard(dim) for dim in range(len(shape)))]:
            cut_source = distribute_tensor(source, mesh, [placement])
            target = distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), mesh, [placement])
            stochastic_round_(target, cut_source, 1, 2, name="w")
            assert same(target.full_tensor(), rounded(source)), (shape, placement)


@pytest.mark.parametrize(
    ("target", "source", "error", "words"),
    [
        (torch.zeros(2), torch.zeros(2), TypeError, "target has dtype torch.float32"),
        (torch.zeros(2).half(), torch.zeros(2).double(), TypeError, "source has dtype torch.float64.*call .float"),
        (torch.zeros(2).bfloat16(), torch.zeros(3), ValueError, r"\(2,\) and source \(3,\)"),
        (torch.zeros(2).bfloat16(), torch.zeros(2, device="meta"), ValueError, "on cpu, the source on meta"),
    ],
)
def test_what_does_not_fit_is_refused(target, source, error, words):
    with pytest.raises(error, match=words):
        stochastic_round_(target, source, 0, 0)


class Unsigned(int):
    """A uint32 as Triton computes with it."""

    __slots__ = ()

    def __add__(self, other):
        return Unsigned(int(self) + int(other) & EVERY_BIT)

    def __mul__(self, other):
        return Unsigned(int(self) * int(other) & EVERY_BIT)

    def __xor__(self, other):
        return Unsigned(int(self) ^ int(other))

    def __rshift__(self, other):
        return Unsigned(int(self) >> int(other))


def test_the_kernel_for_gpus_has_the_same_hash(monkeypatch):
    """Its source, run on a model of uint32: Triton itself needs a GPU."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit = lambda function=None, **_: function or (lambda kernel: kernel)
    triton.language, language.constexpr = language, int
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "par_precision.rounding.triton", raising=False)
    kernel = importlib.import_module("par_precision.rounding.triton")
    monkeypatch.delitem(sys.modules, "par_precision.rounding.triton")
    keys = keys_of(1, 2, "w")
    for index in [*range(1000), 2**31, 2**32 + 5]:
        state = Unsigned(index * SPREAD + keys[0] & EVERY_BIT)
        assert kernel.mix(state, Unsigned(keys[1])) == hashed(index, keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_numbers_of_a_row_do_not_depend_on_how_it_is_counted(dtype):
    """Lengths that are folded, that are not, and steps in memory."""
    source = torch.randn(2049, generator=torch.Generator().manual_seed(0))
    row = torch.empty(2049, dtype=dtype)
    stochastic_round_(row, source, 3, 5, name="w")
    for size in (2048, 1500, 512):
        for step in (1, 2):
            part = torch.empty(size * step, dtype=dtype)[::step]
            stochastic_round_(part, source[:size], 3, 5, name="w")
            assert torch.equal(part, row[:size])


def test_many_tensors_round_together_as_each_does_alone():
    shapes = [(), (1,), (0, 3), (123,), (15, 17), (3, 5, 7)]
    sources = {f"{len(shape)} {shape}": torch.randn(shape) for shape in shapes}
    for dtype in HALVES:
        targets = {name: torch.empty(source.shape, dtype=dtype) for name, source in sources.items()}
        pairs = [(targets[name], source, name) for name, source in sources.items()]
        round_all_([Rounding(*pair, suffix=".moment") for pair in pairs], 1, 2)
        for name, source in sources.items():
            assert same(targets[name], rounded(source, name=f"{name}.moment", dtype=dtype))


def test_an_attribute_of_a_parameter_changes_nothing():
    source = torch.randn(15, 17)
    parameter = torch.nn.Parameter(torch.empty(15, 17, dtype=torch.bfloat16))
    parameter.note = "of the model's own"
    stochastic_round_(parameter, source, 1, 2, name="w")
    assert same(parameter.detach(), rounded(source))
