"""Attention over a sequence that is split over ranks: each rank fetches only the keys that its mask can see.

mask and tokens -> pieces (what to compute) and fetch (what travels) -> kernels, merge, steps -> modes -> context.
Everything before the kernels is pure arithmetic, identical on all ranks; cost and balance count it.
"""
