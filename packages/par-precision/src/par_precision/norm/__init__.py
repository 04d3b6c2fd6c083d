"""The norm of all gradients of a model, and clipping by it, the same on every rank.

ownership (what each tensor says of itself) -> counted (the elements that this rank adds up) -> sums (on this rank, in
fp64) -> norm (one all-reduce over the ranks) -> clip (the gradients, in place).
"""
