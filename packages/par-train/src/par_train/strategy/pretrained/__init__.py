"""Models of transformers from a folder, with adapters of peft: made, filled and written, each rank its own part.

Read in this order: adapters (LoRA around linears, and what is refused) -> make (a folder becomes this rank's part of a
model) -> files (adapters alone, or merged into the weights).
"""
