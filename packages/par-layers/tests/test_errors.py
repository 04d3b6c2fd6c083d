"""Sizes that do not fit are a ValueError at construction, on every rank, that names the size and the divisor."""

import pytest

from .helpers import modes

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


def assert_refused(mode, cases):
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make(mode.layers)


@pytest.mark.ranks(4)
def test_sizes_in_1d_and_on_a_square():
    for mode in modes([{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}]):
        assert_refused(mode, OF_1D)
    for mode in modes([{"mode": "1d", "kv_heads": 1}, {"mode": "1d", "kv_heads": 2}]):
        assert_refused(mode, WITH_COPIES)
    for mode in modes([{"mode": "2d"}, {"mode": "2.5d", "depth": 1}]):
        assert_refused(mode, OF_A_SQUARE)


@pytest.mark.ranks(8)
def test_sizes_on_squares_with_depth_and_on_a_cube():
    for mode in modes([{"mode": "2.5d", "depth": 2}]):
        assert_refused(mode, OF_A_SQUARE)
    for mode in modes([{"mode": "3d"}]):
        assert_refused(mode, OF_A_CUBE)
