"""Mixtures of experts in the plan.

`mixture` describes a layer of experts, `spread` its placement on ranks, and `costs` its memory, work and traffic.
"""
