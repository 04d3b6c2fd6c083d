"""Layers over two nodes of two ranks."""
# ruff: noqa: C408 - configs are written with dict()

ranks = 4
parallel = dict(
    pipeline=dict(size=1),
    tensor=dict(size=4, mode="new_mode", arg1=2, arg2=2),
)
plugins = ["recompute"]
