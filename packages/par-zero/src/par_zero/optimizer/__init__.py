"""The optimizers of a module that is sharded.

`probe` finds out how one works, by trying it. `step` lets it hold flat slices of chunks in place of parameters, and
keeps what must not move in its step. For one that must see whole tensors, `blocks` says what these are where ranks have
parts, and which rank steps which; `agreement` lets the ranks agree on that; `assembly` puts them together.
"""
