"""What one call of a layer does: `observer` looks on while it runs, `measure` lets it run on fake tensors.

An observer hears of every operation, every module and every tensor that autograd saves, and makes a `plan.Table` of it.
"""
