"""Reductions of gradients, chunk by chunk, during backward.

`backward` has autograd call `reducer` for every gradient, and keeps which gradients the pass has brought and still
expects. `order` says which chunk is next, whose collectives begin and continue in `in_flight`. `usage` keeps which
parameters had gradients.
"""
