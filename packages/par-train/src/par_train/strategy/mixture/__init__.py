"""Mixtures of experts under a strategy, beside what the layers do themselves.

`share` tells par-zero who has copies of an expert, `factor` tells routers what the main loss is multiplied by, and
`load` says over all ranks how busy experts are.
"""
