"""Ranks that enforce on a CPU what NCCL would, and name the difference between two ranks instead of hanging.

`group` is the process group that a rank's torch calls; `player` hands each operation to the `referee`, which compares
it with those of the other ranks (`queues`), says when it runs, and sees who waits for whom (`wait_for`). What happens
to an operation's tensors in between is in `buffers`, what it makes of them in `compute`.
"""
