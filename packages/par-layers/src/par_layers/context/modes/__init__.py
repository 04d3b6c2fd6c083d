"""How attention reaches the keys of other ranks: by one exchange, around a ring, or by tokens in exchange for heads.

`attention` chooses kernels and a plan, and hands both to the mode's own module.
"""
