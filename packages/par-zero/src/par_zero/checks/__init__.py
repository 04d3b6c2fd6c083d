"""Checks of `shard` before anything is changed.

`module` checks what one rank can see, and `agreed` lets the ranks agree: all raise if one has a problem.
"""
