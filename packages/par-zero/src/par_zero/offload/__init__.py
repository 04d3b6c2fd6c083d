"""The optimizer's state on a disk.

`pieces` says which state lies where, and where in the file; `disk` is the file, which is read and written directly, and
mapped into memory for everybody else; `twin` steps one piece as the optimizer itself would. `stream` goes through the
pieces in a step: one is read, one is stepped, one is written.
"""
