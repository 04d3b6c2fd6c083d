"""Observation of one call of a layer: `observer` records a real call, `measure` runs the layer on fake tensors.

An observer receives every operation, every module and every tensor that autograd saves, and builds a `plan.Table`.
"""
