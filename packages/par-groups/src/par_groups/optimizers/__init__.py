"""Optimizers as they are: which tensors an update reads, the state that they keep, and steps by clones of them.

`classes` is a table of known classes, in which `scope` looks up an optimizer. `trial` steps small tensors, by `clone`.
"""
