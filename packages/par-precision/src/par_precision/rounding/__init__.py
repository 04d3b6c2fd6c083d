"""Stochastic rounding of fp32 numbers to bf16 and fp16, independent of how a tensor is sharded.

`step` runs any optimizer in fp32, one piece of the model at a time. `rounding` rounds tensors by their sharding
metadata. `matrices` splits them into matrices with keys for random numbers, for `tiles` (torch) or `triton` (GPUs).
"""
