"""A mixture of experts over ranks: each token goes to the few experts that its router chooses, wherever they live.

A router scores (`router`), pure arithmetic chooses (`choose`), a recompute is given the same choice (`replay`), and
losses and a bias keep the experts equally busy (`balance`).
"""
