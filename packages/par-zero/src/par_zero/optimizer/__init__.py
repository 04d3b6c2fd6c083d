"""The optimizers of a module that is sharded.

`probe` finds out how one works, by trying it; `step` lets it hold flat slices of chunks in place of parameters, and
keeps what must not move in its step.
"""
