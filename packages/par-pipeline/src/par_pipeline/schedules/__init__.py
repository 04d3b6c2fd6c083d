"""Schedules as data: what every rank of a pipeline does, in order. Nothing here needs torch.

An `Action` is one step of one rank; a `Schedule` holds the actions of all ranks, and a `Placement` says which rank
holds which stage. Functions such as `gpipe` make schedules, and the registry finds them by name. `walk` goes through
all actions in the order in which they can run; the validator here and the simulator in `analysis` are built on it.
"""
