"""Tensor parallelism of existing models, in place and with their code unchanged.

plans (rules per module) -> survey (shards, regions and traffic; changes nothing) -> parallelize (applies it).
The other modules are what parallelize installs: linears, hooks, losses, dropout, generation and guards.
"""
