"""Freed parameters, which raise a named error when code uses them, the tensors in outputs of modules, and calls.

`freed` defines the classes of freed parameters, which are similar to par-groups' stand-ins for gradients. `outputs`
finds the tensors through which backward reaches a module, and `calls` names the calls that all ranks make. Chunks
import this subpackage, which imports no chunks.
"""
