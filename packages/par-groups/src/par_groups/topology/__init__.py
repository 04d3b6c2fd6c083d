"""The arithmetic of ranks, pure: no torch, no processes.

A `parallel` config (`config`) becomes named axes and sizes; a tensor or sequence mode (`modes`) splits one of them;
`topology` answers which ranks share a group; `describe` and `draw` show that to a person.
"""
