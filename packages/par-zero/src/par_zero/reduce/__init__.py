"""Reductions of gradients, chunk by chunk, during backward.

`backward` registers `reducer` for every gradient, and stores which gradients have arrived and which are expected.
`order` and `sections` determine the next chunk, and `in_flight` runs its collectives. `usage` stores which parameters
had gradients.
"""
