"""Sums of gradients that do not depend on their order, so that a run has the same bits under every topology.

grid (each loss's gradients, rounded to multiples of one unit) -> the data-parallel sum, in fp64, by anyone ->
squares (the norm, in whole numbers) -> sums (what a `MixedOptimizer` then divides by and clips with).
"""
