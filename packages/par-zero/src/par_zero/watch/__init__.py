"""What a program reads where par-zero keeps something else, and what its modules return.

Freed parameters and gradients that live in the optimizer are tensors that name themselves when they are used. `outputs`
finds the tensors through which backward will come. Nothing here imports chunks: they import this.
"""
