"""Arithmetic on what a layer keeps: which bytes, for which seconds, and one choice a layer within a budget.

A `table` says what autograd saves and which module made it; a `frontier` the best choices of one layer; a `knapsack`
takes one of each. Pure: nothing here runs a model.
"""
