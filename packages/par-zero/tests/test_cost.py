"""The formulas of memory and traffic, against the papers' numbers and against the tables written out."""

from fractions import Fraction

import pytest
import torch

from par_zero import MixedPrecision, bucket_bytes, memory, traffic

BF16 = {"param_dtype": torch.bfloat16}
BF16_FP32_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ROWS = [  # bytes per parameter that every rank has, and that are divided by the number of ranks
    ({}, ((16, 0), (8, 8), (4, 12), (0, 16))),
    (BF16, ((16, 0), (4, 12), (2, 14), (0, 16))),
    (BF16_FP32_SUMS, ((18, 0), (6, 12), (2, 16), (0, 18))),
]


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_zero_papers_figure_comes_out(stage, gigabytes):
    total = memory(stage, 7_500_000_000, 64, precision=MixedPrecision(**BF16)).total / 1e9
    assert total == pytest.approx(gigabytes, rel=3e-3)  # the paper gives three digits


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
@pytest.mark.parametrize(("dtypes", "row"), ROWS)
def test_bytes_per_parameter_are_those_of_the_table(dtypes, row, ranks):
    for stage, (whole, shared) in enumerate(row):
        assert memory(stage, 1024, ranks, precision=MixedPrecision(**dtypes)).total == 1024 * (
            whole + Fraction(shared, ranks)
        )


def test_momentum_needs_one_slot_and_plain_sgd_none():
    assert memory(1, 100, 4, slots=1).optimizer == 100
    assert memory(1, 100, 4, slots=0).optimizer == 0
    assert memory(1, 100, 4, slots=0, precision=MixedPrecision(**BF16)).optimizer == 100  # the fp32 parameters


@pytest.mark.parametrize("stage", range(4))
def test_buffers_are_those_of_the_chunks_in_flight(stage):
    two, three = (memory(stage, 6400, 4, chunk=800, inflight=inflight) for inflight in (2, 3))
    assert memory(stage, 6400, 4, chunk=800) == two
    assert three.buffers == two.buffers * 3 / 2 == 3 * 800 * 4 * (1 + (stage > 1))
    assert three.total - three.buffers == two.total - two.buffers


def test_an_automatic_bucket_keeps_hops_below_a_fifth_of_a_collective():
    latency, bandwidth = 8e-6, 45e9
    for ranks in (1, 2, 8, 64, 1024, 100_000):
        size = bucket_bytes(ranks)
        hops, bytes_ = (ranks - 1) * latency, (ranks - 1) / ranks * size / bandwidth
        assert hops <= 0.2 * bytes_
        assert size == 25_000_000 or bytes_ <= 10 * hops  # no larger than that takes
    assert bucket_bytes(8) == 25_200_000
    assert bucket_bytes(64) == 226_800_000
    assert bucket_bytes(64, latency=0) == 25_000_000
    assert bucket_bytes(8, latency=3e-6, bandwidth=370e9) == 77_700_000


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"ranks": 2, "latency": -1.0}, {"ranks": 2, "bandwidth": -1.0}])
def test_a_ring_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="they describe no ring; pass 1 rank or more, and no negative numbers"):
        bucket_bytes(**wrong)


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_moves_what_the_table_says(stage, times, ranks):
    assert traffic(stage, 6400, ranks) == 6400 * times * Fraction(ranks - 1, ranks)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_microbatches_cost_a_reduction_each_unless_they_are_not_synchronised(microbatches):
    k, part = microbatches, 6400 * Fraction(3, 4)
    apart = [traffic(stage, 6400, 4, microbatches=k) for stage in range(4)]
    assert apart == [2 * k * part, (k + 1) * part, (k + 1) * part, 3 * k * part]
    together = [traffic(stage, 6400, 4, microbatches=k, no_sync=True) for stage in range(4)]
    assert together == [2 * part, 2 * part, 2 * part, (2 if k > 1 else 3) * part]
    anew = [traffic(stage, 6400, 4, microbatches=k, no_sync=True, keep=False) for stage in range(4)]
    assert anew == [2 * part, 2 * part, 2 * part, (2 * k + 1) * part]


@pytest.mark.parametrize("stage", range(4))
def test_replicas_add_an_all_reduce_of_the_share(stage):
    parameters, shards, replicas = 6400, 4, 2
    added = traffic(stage, parameters, shards, replicas=replicas) - traffic(stage, parameters, shards)
    assert added == 2 * Fraction(parameters, shards) * Fraction(replicas - 1, replicas)


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_put_together_over_tensor_ranks_moves_three_times_and_has_memory_of_its_own(ranks):
    """Each data rank does it for its share, at stage 0 for all."""
    for stage, (share, k) in enumerate([(1, 1), (ranks, 1), (ranks, 3), (ranks, 1)]):
        options = {"microbatches": k}
        added = traffic(stage, 6400, ranks, assembled=4800, tensor=8, **options) - traffic(
            stage, 6400, ranks, **options
        )
        assert added == pytest.approx((k + 2) * 4800 / share * 7 / 8)
        more = memory(stage, 6400, ranks, slots=1, assembled=4800).total - memory(stage, 6400, ranks, slots=1).total
        assert more == pytest.approx(4800 / share * (4 + 4))  # a gradient and a parameter
        half = [
            memory(stage, 6400, ranks, slots=1, assembled=each, precision=MixedPrecision(**BF16)).total
            for each in (0, 4800)
        ]
        assert half[1] - half[0] == pytest.approx(
            4800 / share * 4
        )  # the parameter is the fp32 copy that there is anyway
