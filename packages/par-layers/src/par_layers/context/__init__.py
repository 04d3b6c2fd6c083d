"""Attention over a sequence that is cut across ranks: each rank fetches what its mask lets it see, and no more.

Pure arithmetic, the same on every rank: mask (two integers a query) and tokens (who holds which) -> pieces (what is
computed) and fetch (what travels); cost and balance count both. Then what runs: kernels compute pieces, merge adds them
up, steps are the pieces of one rank in order; each of the modes is one way to communicate, and context is
what models are given.
"""
