"""Mixtures of experts under a strategy: the parts that the layers cannot do alone.

Arguments: `share` gives par-zero the ranks that hold replicas of an expert. In a step, `factor` passes the factor of
the main loss to the routers, also over pipeline stages.
"""
