"""Freed parameters, which raise a named error when code uses them, and the tensors in the outputs of modules.

`freed` defines the classes of freed parameters, which are similar to par-groups' stand-ins for gradients. `outputs`
finds the tensors through which backward reaches a module. Chunks import this subpackage, which imports no chunks.
"""
