"""A pass at stage 3 as data: events of the model, and what is gathered and freed at each of them.

`entries` is the vocabulary, and `compiler` makes a program of a recorded trace; both are pure. `book` knows which
program a pass follows, `steps` those of whole steps within a budget. `executor` follows them, and `agreement` has the
ranks compare what they come to.
"""
