"""Counts for one rank: bytes of memory, traffic, pipeline idle time, and attention over a split sequence.

Each module imports `shape` and `inputs` only, or the module before it: pipeline, memory, traffic, sequence.
"""
