"""A layer that runs: what it keeps for its backward, and what it makes again.

`frame` is one call of a layer that drops what some of its modules make; `whole` one that keeps its inputs alone; `away`
puts what they keep into host memory, by `copies`; `packed` is what stands for a saved tensor meanwhile;
`layer` has the hooks that begin and end them, and asks the `planner` which it is to be.
"""
