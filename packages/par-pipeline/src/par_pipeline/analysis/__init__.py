"""Analysis of a schedule before it runs, and of a step that has run. No module here needs torch.

`simulate` walks through a schedule with `Costs` and returns a `Timeline`: times, idle time, memory. The runtime records
a `Timeline` of the same kind, from which `Costs.measured` reads real costs. `draw` draws a timeline.
"""
