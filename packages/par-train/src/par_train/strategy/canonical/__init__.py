"""Canonical numerics: a step whose bits do not depend on the topology, because each of its sums is exact.

environment (what bits depend on), lanes (a batch as lanes) and randomness (seeds of lanes) serve `Strategy`; plugins
(gradients on a grid, exact norm, ties, checks) are applied in `initialize`, in the order of `choose_plugins`.
"""
