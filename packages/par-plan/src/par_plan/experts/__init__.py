"""Mixtures of experts in the plan.

`mixture` is what a model says of them, `spread` how they lie on ranks, and `costs` what a rank keeps, computes and
receives of them, by the counts of par-layers.
"""
