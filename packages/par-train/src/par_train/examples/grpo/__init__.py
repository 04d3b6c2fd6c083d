"""GRPO on small sums: a trainer and generators, each with a parallelism of its own, which run concurrently.

`__main__` starts one process for each rank and restarts what dies. The ranks run `roles.train` or `roles.generate`.
`task` has the sums and the rewards. Weights go to the generators as versions of a `Publisher`, and batches of samples
come back through a queue in the store.
"""
