"""What differs between the modes: how activations and weights are cut, and the product over the ranks.

`grid` knows this rank's place, `layout` how an activation is cut; `product_1d`, `summa` and `cube` multiply over a
line, a square and a cube of ranks. `rules` puts these into one record; `modes` has that of each mode that we ship.
"""
