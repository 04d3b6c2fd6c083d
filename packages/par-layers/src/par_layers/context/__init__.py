"""Attention over a sequence that is cut across ranks: each rank fetches what its mask lets it see, and no more.

mask (two integers a query) and tokens (who holds which) -> pieces (what kernels compute) and fetch (what travels); cost
and balance count both. Everything named here is pure arithmetic, the same on every rank.
"""
