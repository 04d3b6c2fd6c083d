"""Sizes that do not fit are a ValueError at construction, on every rank, that names the size and the divisor."""

import pytest

from .helpers import simulated

OF_1D = [
    (lambda layers: layers.ColumnLinear(16, 18), "18 units of 1 features .* by 4 ranks .*; use 20 features$"),
    (lambda layers: layers.ColumnLinear(16, 18, blocks=[15, 3]), "15 units .*; use 16 features$"),
    (lambda layers: layers.ColumnLinear(16, 24, unit=8), "3 units of 8 .*; use 32 features$"),
    (lambda layers: layers.RowLinear(18, 16), "in_features is 18, .* by 4 ranks .*; use 20"),
    (lambda layers: layers.Linear(16, 18), "out_features is 18, .* by 4 ranks .*; use 20"),
    (lambda layers: layers.ColumnLinear(16, 16, unit=3), "block of 16 features .* units of 3"),
    (lambda layers: layers.ColumnLinear(16, 16, blocks=3), "out_features is 16, .* 3 blocks"),
    (lambda layers: layers.ColumnLinear(16, 16, blocks=[8, 4]), r"\[8, 4\] add up to 12, .* is 16"),
    (lambda layers: layers.ColumnLinear(16, 16, unit=8), "2 units of 8 .* 4 ranks .*kv_heads=2"),
    (lambda layers: layers.local_heads(6), "6 units .* 4 ranks"),
    (lambda layers: layers.VocabEmbedding(8, 16, padding_id=8), "padding_id is 8; .* 0 to 7"),
    (lambda layers: layers.VocabEmbedding(8, 16, padding_id=-1), "padding_id is -1; .* 0 to 7"),
]

# More units than ranks, so nothing is copied, though the config allows copies.
WITH_COPIES = [
    (lambda layers: layers.ColumnLinear(16, 5), "5 units .*; use 8 features$"),
    (lambda layers: layers.ColumnLinear(16, 6), "6 units .*; use 8 features$"),
    (lambda layers: layers.ColumnLinear(16, 23, blocks=[15, 4, 4]), "15 units .*; use 16 features$"),
    (lambda layers: layers.local_heads(6), "6 units .*; use 8 features$"),
]

OF_A_SQUARE = [
    (lambda layers: layers.ColumnLinear(15, 16), "in_features is 15, .* by 2 ranks .*; use 16"),
    (lambda layers: layers.ColumnLinear(16, 15), "15 units .* 2 ranks .*; use 16 features$"),
    (lambda layers: layers.RowLinear(15, 16), "in_features is 15, .* by 2 ranks"),
    (lambda layers: layers.RowLinear(16, 15), "out_features is 15, .* by 2 ranks"),
    (lambda layers: layers.Linear(15, 16), "in_features is 15, .* by 2 ranks"),
    (lambda layers: layers.Linear(16, 15), "out_features is 15, .* by 2 ranks"),
    (lambda layers: layers.LayerNorm(15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.RMSNorm(15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.Embedding(8, 15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.VocabEmbedding(8, 15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.PositionEmbedding(8, 15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.PatchEmbedding(2, 3, 15), "features is 15, .* by 2 ranks"),
    (lambda layers: layers.Classifier(15, 3), "hidden is 15, .* by 2 ranks"),
    (lambda layers: layers.VocabClassifier(15, 3), "hidden is 15, .* by 2 ranks"),
]

# Weights are cut twice along their in features: by 2 x 2.
OF_A_CUBE = [
    (lambda layers: layers.ColumnLinear(18, 16), r"in_features is 18, .* by 4 ranks \(output x weight\); use 20"),
    (lambda layers: layers.RowLinear(18, 16), r"in_features is 18, .* by 4 ranks \(input x weight\); use 20"),
    (lambda layers: layers.Linear(18, 16), "in_features is 18, .* by 4 ranks"),
    (lambda layers: layers.VocabClassifier(18, 16), "hidden is 18, .* by 4 ranks"),
    (lambda layers: layers.LayerNorm(15), r"features is 15, .* by 2 ranks \(output\); use 16"),
    (lambda layers: layers.Classifier(15, 3), "hidden is 15, .* by 2 ranks"),
]


def assert_refused(world, tensor, cases):
    for rank in (0, world - 1):
        with simulated(world, tensor, rank) as mode:
            for make, message in cases:
                with pytest.raises(ValueError, match=message):
                    make(mode.layers)


@pytest.mark.ranks(1, init=False)
def test_sizes_in_1d():
    for options in ({}, {"sequence_parallel": True}):
        assert_refused(4, {"mode": "1d", **options}, OF_1D)
    for heads in (1, 2):
        assert_refused(4, {"mode": "1d", "kv_heads": heads}, WITH_COPIES)


@pytest.mark.ranks(1, init=False)
def test_sizes_on_squares_and_on_a_cube():
    assert_refused(4, {"mode": "2d"}, OF_A_SQUARE)
    for world, depth in ((4, 1), (8, 2)):
        assert_refused(world, {"mode": "2.5d", "depth": depth}, OF_A_SQUARE)
    assert_refused(8, {"mode": "3d"}, OF_A_CUBE)
