"""Optimizers of a sharded module.

`step` replaces an optimizer's parameters by flat slices of chunks. `apart` steps parameters of a slice separately if
their states differ. `written` detects writes outside of a step, and `packed` detects replaced
parameters. An optimizer that needs full tensors steps blocks: `blocks` computes them and their ranks, `agreement` lets
the ranks agree on them, and `assembly` assembles them from the shards of tensor-parallel ranks.
"""
