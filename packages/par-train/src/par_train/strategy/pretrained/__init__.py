"""Transformers models under a strategy: `par_layers.pretrained`, wired with stages, files and microbatches.

Read in this order: make (a folder becomes this rank's part of a model) -> sequence (split batches) -> files (adapters
only, or merged into the weights).
"""
