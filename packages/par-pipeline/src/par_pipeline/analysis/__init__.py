"""What can be said of a schedule before it runs, and of a step that has run. Nothing here needs torch.

`simulate` walks through a schedule with `Costs` and gives a `Timeline`: times, idle time, memory. The runtime records
a `Timeline` of the same kind, from which `Costs.measured` reads real costs. `draw` makes the picture of one.
"""
