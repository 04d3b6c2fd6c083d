"""What a program reads where par-zero keeps something else, and what its modules return.

Freed parameters are tensors that name themselves when they are used, as par-groups' stand-ins for gradients do.
`outputs` finds the tensors through which backward will come. Nothing here imports chunks: they import this.
"""
