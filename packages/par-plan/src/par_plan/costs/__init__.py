"""Counts for one rank: bytes of memory, traffic, idle time of the pipeline, and attention over a split sequence.

`traffic` uses `memory` and `pipeline`, and `sequence` uses `traffic`.
"""
