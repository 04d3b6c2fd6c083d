"""The plan of the units that are gathered on the device at each moment of a step. Pure arithmetic, before a step runs.

A `Trace` lists the units that each moment of a step needs. `place` turns a trace into a `Placement` within a budget, by
a policy from a registry. `simulate` counts the bytes that a placement moves. Each built-in policy selects **gaps**: for
each unit, the spans between two moments that need it, during which it stays on the device.
"""
