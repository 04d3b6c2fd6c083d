"""Which units are whole on the device at which moment of a step. Pure arithmetic, planned before a step runs.

A `Trace` says what a step needs, moment by moment; `place` makes a `Placement` of it within a budget, by a policy that
the registry finds by name; `simulate` goes through it and counts what is moved. Every built-in policy is a choice of
gaps: of a unit between two moments that need it, and whether it stays on the device meanwhile.
"""
