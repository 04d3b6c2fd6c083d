"""Modes of attention over the keys of other ranks: one exchange, a ring, or an exchange of tokens for heads.

`attention` chooses kernels and a plan, and hands both to the mode's own module.
"""
