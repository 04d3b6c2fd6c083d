"""Optimizer state, parameters and gradients on a disk. A step calls `fetch`, updates and calls `evict` per piece.

Data flows from `plan` (tiers, pieces, places in the file) to `tier` (the loop of a step), and from there through
`swapper`, `shards` and `gradients`, which share the file (`disk`), staging buffers and errors.
"""
