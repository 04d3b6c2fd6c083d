"""Ranks that come and go while a job runs.

A `keeper` on each host starts the ranks and sees their deaths. The `roster` in the first keeper decides which ranks are
in, once for each epoch. A rank has `members`, which forms the process group of an epoch and leaves it; `waits` end with
the epoch. Keeper and rank talk over a `link`.
"""
