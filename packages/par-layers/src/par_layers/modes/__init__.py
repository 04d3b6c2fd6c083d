"""Modes of tensor parallelism: they differ in the sharding of activations and weights, and in the matmul over ranks.

`grid` has a rank's coordinates and `layout` the sharding of activations; `product_1d`, `summa` and `cube` are matmuls
over a line, a square and a cube of ranks. `rules` combines them, and `modes` has the rules of 1d, 2d, 2.5d and 3d.
"""
