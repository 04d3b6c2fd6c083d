"""When modules are called, and what a backward pass has therefore left behind.

`outputs` finds the tensors whose gradients tell where the backward of a call begins, `record` knows the calls, and
`closer` has a chunk reduced when backward is done with all modules that have its parameters. Stage 3 gathers by the
same record.
"""
