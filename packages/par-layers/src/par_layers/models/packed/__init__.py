"""Expert parallelism for existing models, whose experts are one module with packed parameters.

`pack` makes such a module from a list of experts, and `look` converts it to this package's experts. `forward` replaces
its forward, `routed` the forward of the block around it, and `balance` its load-balancing loss. `found` lists the
modules.
"""
