"""Stochastic rounding of fp32 numbers to bf16 and fp16, the same however a tensor is cut over ranks.

step (any optimizer's step in fp32, a piece of the model at a time) -> rounding (of tensors, as their records cut them)
-> matrices (what is rounded at once, and the keys of its random numbers) -> tiles (torch's operations) or triton (a
kernel for GPUs).
"""
