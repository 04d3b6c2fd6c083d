"""The optimizer's state on a disk, and at stage 3 parameters and gradients.

`pieces` says what lies where, and where in the file; `disk` is the file, which is read and written directly, and
mapped into memory for everybody else; `twin` steps one piece as the optimizer itself would. `stream` goes through the
pieces in a step: one is read, one is stepped, one is written. `shares` reads parameters before a unit is gathered,
`sums` writes gradients when a chunk is reduced; their buffers come from a `pool`.
"""
