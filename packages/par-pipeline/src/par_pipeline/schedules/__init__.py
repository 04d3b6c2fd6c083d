"""Schedules as data: the actions of every rank of a pipeline, in order. No module here needs torch.

An `Action` is one step of one rank; a `Schedule` holds the actions of all ranks, and a `StagePlacement` maps stages to
ranks. Functions such as `gpipe` make schedules, and the registry finds them by name. `walk` goes through
all actions in the order in which they can run; the validator here and the simulator in `analysis` are built on it.
"""
