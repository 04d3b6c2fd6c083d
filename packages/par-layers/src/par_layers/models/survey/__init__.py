"""Consequences of a plan for a model, before anything changes: the shard of each parameter, regions, and their traffic.

plan -> survey (regions, the sequence) -> parameters (this rank's shards, by kinds of modules) -> traffic.
"""
