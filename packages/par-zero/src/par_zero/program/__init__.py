"""A pass at stage 3 as data: events of the model, and what is gathered and freed at each of them.

`entries` is the vocabulary, `compiler` makes a program of a recorded trace, `book` knows which program a pass follows,
`executor` follows it, and `agreement` has the ranks compare what they come to.
"""
