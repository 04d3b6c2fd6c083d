"""Arithmetic on saved activations: bytes and seconds of each choice, and one choice per layer within a budget.

A `table` lists the tensors that autograd saves and the modules that made them. A `frontier` holds the best choices of
one layer. A `knapsack` takes one choice of each layer. Pure: no function here runs a model.
"""
