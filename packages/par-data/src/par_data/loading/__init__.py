"""Batches: each rank loads its shard of every global batch and moves it to its device.

`loader` picks a source of batches (`sources`, `lanes`, `broadcast`) by the kind of dataset; a source gets indices from
`samplers`, random numbers from `randomness` and worker processes from `workers`. `device` moves the finished batch, and
`comparison` compares batches that several ranks must read identically.
"""
