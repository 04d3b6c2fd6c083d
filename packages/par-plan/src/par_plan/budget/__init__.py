"""Decisions within a byte budget for device, host and disk: what is offloaded, and what is recomputed.

`recompute` reads what can be said of activations: a policy of par-recompute, or a text for the command line. `spend`
and `tiers` are pure: what a budget of bytes is spent on, and what leaves a device that is too small. `budget` is one
number for each tier, and what is chosen within them.
"""
