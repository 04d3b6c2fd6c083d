"""Transformers models under a strategy: `par_layers.pretrained`, wired with stages, files and microbatches.

Read in this order: make (a folder becomes this rank's part of a model) -> files (adapters only, or merged into the
weights).
"""
